# AppArmor holds the daemon, and whatever it starts, to what a node without BPF takes: everything that docs/security.md
# names for `netlink`, and neither CAP_BPF nor CAP_PERFMON.
test "$(cat /sys/module/apparmor/parameters/enabled)" = Y
cat >/run/resolver.profile <<'PROFILE'
abi <abi/3.0>,
profile resolver /venv/bin/resolver flags=(attach_disconnected) {
  file,
  network,
  unix,
  signal,
  ptrace (read, readby),
  capability dac_override,
  capability net_admin,
  capability setpcap,
  capability sys_ptrace,
}
PROFILE
apparmor_parser --replace --skip-cache /run/resolver.profile
grep '^resolver (enforce)' /sys/kernel/security/apparmor/profiles
