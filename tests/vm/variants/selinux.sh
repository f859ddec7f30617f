# SELinux enforces Debian's reference policy, and holds the daemon, and whatever it starts, to a domain that may do
# everything but use bpf(). The policy is put together by secilc: Debian's own way takes modules for services that are
# not here. Everything else stays in kernel_t, which may do everything, because no file but the daemon's is labelled.
mkdir /run/policy
mount -t selinuxfs selinuxfs /sys/fs/selinux
python3 - <<'PYTHON'
import bz2, re, subprocess
modules = {}
for name in ("base", "unconfined"):
    with bz2.open(f"/usr/share/selinux/default/{name}.pp.bz2") as packed, open(f"/run/policy/{name}.pp", "wb") as file:
        file.write(packed.read())
    pp = ("/usr/libexec/selinux/hll/pp", f"/run/policy/{name}.pp")
    modules[name] = subprocess.run(pp, capture_output=True, check=True, text=True).stdout
# A login of a display manager, whose user is in a module that is not here.
modules["base"] = re.sub(r"(?m)^\(selinuxuser sddm .*$", "", modules["base"])
# Since 2:2.20250213-13 the base declares the other module's role as well.
declared = set(re.findall(r"(?m)^\(role \w+\)$", modules["base"]))
modules["unconfined"] = re.sub(
    r"(?m)^\(role \w+\)$", lambda role: "" if role[0] in declared else role[0], modules["unconfined"]
)
own = """
(type resolver_t)
(type resolver_exec_t)
(roletype system_r resolver_t)
(roletype object_r resolver_exec_t)
(typeattribute everything)
(typeattributeset everything (all))
(typetransition kernel_t resolver_exec_t process resolver_t)
(allow everything everything (filesystem (all)))
"""
for kind in re.findall(r"(?m)^\(class (\w+) ", modules["base"]):
    own += f"(allow kernel_t everything ({kind} (all)))\n"
    if kind != "bpf":
        own += f"(allow resolver_t everything ({kind} (all)))\n(allow everything resolver_t ({kind} (all)))\n"
for name, text in {**modules, "own": own}.items():
    with open(f"/run/policy/{name}.cil", "w") as file:
        file.write(text)
PYTHON
cd /run/policy
secilc --disable-neverallow --policyvers=33 --mls=true --output=policy --filecontext=contexts base.cil unconfined.cil own.cil
# The kernel takes a policy in one write.
python3 -c 'import os; assert os.write(os.open("/sys/fs/selinux/load", os.O_WRONLY), open("policy", "rb").read())'
setfattr() { python3 -c 'import os, sys; os.setxattr(sys.argv[1], "security.selinux", sys.argv[2].encode() + b"\0")' "$@"; }
setfattr /venv/bin/resolver system_u:object_r:resolver_exec_t:s0
printf 1 >/sys/fs/selinux/enforce
test "$(cat /sys/fs/selinux/enforce)" = 1
