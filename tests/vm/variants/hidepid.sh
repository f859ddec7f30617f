# Other users' processes are hidden from everybody without CAP_SYS_PTRACE.
mount -o remount,hidepid=2 /proc
grep ' /proc proc .*hidepid=' /proc/mounts
