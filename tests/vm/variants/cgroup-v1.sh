# Each controller in a hierarchy of its own, as before systemd 226: there is no cgroup2 at all.
umount /sys/fs/cgroup
mount -t tmpfs cgroup /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
for controller in $(awk '$4 == 1 { print $1 }' /proc/cgroups); do
    mkdir "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" || rmdir "/sys/fs/cgroup/$controller"
done
cat /proc/self/cgroup
grep -q ':pids:/' /proc/self/cgroup
