# Become host number $1: a name, memory, processes and a link of its own, of rate $2 each way.
# File descriptor 3 is the network namespace of the switch.
set -e
trap 'echo failed' EXIT
switch=/proc/self/fd/3
limit="root tbf rate $2 burst 128k latency 50ms"
hostname "host$1"
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add eth0 type veth peer name "host$1" netns "$switch"
ip address add "10.77.0.$1/24" dev eth0
ip link set eth0 up
tc qdisc add dev eth0 $limit
nsenter --net="$switch" ip link set "host$1" master switch up
nsenter --net="$switch" tc qdisc add dev "host$1" $limit
echo ready
trap - EXIT
exec env --ignore-signal=CHLD sleep infinity > /dev/null 3<&- # the kernel reaps the orphans
