# Make N hosts on one switch, say so on stdout, and wait for the end of stdin.
#
#     unshare --net --uts --ipc --mount --pid --fork --mount-proc sh switch.sh N RATE
#
# This shell is the login node. It is the first process of a PID namespace: when it ends, the kernel
# ends every process of every host, and then their links, mounts and files. So nothing has to be
# removed, and nothing has a name outside.
set -e
hostname login
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add switch type bridge
ip address add 10.77.0.254/24 dev switch
ip link set switch up

echo 127.0.0.1 localhost > /dev/shm/names
echo 10.77.0.254 login >> /dev/shm/names
for i in $(seq "$1"); do
    echo "10.77.0.$i host$i" >> /dev/shm/names
done
mount --bind /dev/shm/names /etc/hosts

for i in $(seq "$1"); do
    unshare --net --uts --ipc --mount --pid --fork --mount-proc \
        sh "${0%/*}/host.sh" "$i" "$2" 3< /proc/self/ns/net &
    echo $! > "/dev/shm/host$i" # for ssh
done
exec cat > /dev/null
