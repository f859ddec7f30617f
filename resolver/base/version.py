"""The version of this program, which stands here only: `make tables` copies it into manifests, chart and documents."""

VERSION = "0.2.0"

if __name__ == "__main__":
    print(VERSION)  # noqa: T201
