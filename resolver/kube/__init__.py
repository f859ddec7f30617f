"""The reporter of the node's GPUs to the Kubernetes API server, and kubectl's plugin."""
