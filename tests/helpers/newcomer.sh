# For scripts/newcomer.sh, read by bash in a bare Debian before what README.md shows: a folder in
# which Python does not find the checkout's own modules, and what takes the place of Docker.

mkdir -p /root/new
cd /root/new
ln -s /root/kvplane/{dist,examples,models} .
export PIP_QUIET=1 PIP_ROOT_USER_ACTION=ignore DEBIAN_FRONTEND=noninteractive

docker() { echo "newcomer: not run, for want of an engine: docker $*"; }

# Waits until what was started in the background, if anything was, serves HTTP.
is_up() {
  [ -z "$(jobs -p)" ] || until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do
    kill -0 $(jobs -p)
    sleep 0.2
  done
}

# Puts load on what runs, and reads what boards are drawn of.
look() {
  is_up
  python examples/load.py --model models/recall
  python - <<"PYTHON"
from urllib.request import urlopen

print(urlopen("http://127.0.0.1:9103/").status, "of the page")
for port in (9101, 9102):
    for line in urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines():
        if line.startswith(("kvplane_build_info", "kvplane_lookup_tokens_total")):
            print(line)
PYTHON
}
