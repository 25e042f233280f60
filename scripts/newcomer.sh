#!/usr/bin/env bash
# Does what README.md shows to one of its readers, in a bare Debian and with the wheels in dist/, and
# prints the seconds until the result that it promises: make wheels && scripts/newcomer.sh ROLE
#
#   ROLE: model, server, engines, engineer, platform. Fails beyond the role's goal.
#
# For server the clock starts after the installation, for engines after that of vLLM for CPUs. vLLM
# itself copies between a GPU and memory only: here a class of tests/engines/ does. What needs
# Docker's engine is printed, and not done.
set -euo pipefail
cd "$(dirname "$0")/.."

# Prints README.md's programs under a heading, as one of bash.
section() {
  awk -v heading="$1" '
    /^#+ / { is_in = $0 ~ "^#+ " heading "$" }
    is_in && /^```$/ { if (language == "python") print "PYTHON"; language = ""; next }
    is_in && /^```(sh|python)$/ {
      language = substr($0, 4)
      if (language == "python") print "is_up; python - <<\"PYTHON\""
      next
    }
    language { print }
  ' README.md
}
begin() { echo 'SECONDS=0'; }
up() { section 'An OpenAI server' | grep 'kvplane up'; }
install() {
  echo "apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(grep -oPm1 '`apt install \K[^`]*' README.md) >/dev/null"
  section Start
  echo 'echo "newcomer: installed after $SECONDS s"'
}

before='
mkdir -p /root/new && cd /root/new && ln -s /root/kvplane/{dist,examples,models} .
export PIP_QUIET=1 PIP_ROOT_USER_ACTION=ignore
docker() { echo "newcomer: not run, for want of an engine: docker $*"; }
is_up() { # what was started in the background
  [ -z "$(jobs -p)" ] || until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do
    kill -0 $(jobs -p)
    sleep 0.2
  done
}'
look='
is_up
python examples/load.py --model models/recall
python - <<"PYTHON"
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:9103/").status, "of the page")
print(*(line.decode() for port in (9101, 9102) for line in urlopen(f"http://127.0.0.1:{port}/metrics")
        if line.startswith((b"kvplane_build_info", b"kvplane_lookup_tokens_total"))), sep="")
PYTHON'
have_vllm='
python3 -m venv engine
engine/bin/pip install -r /root/kvplane/tests/engines/requirements.txt
engine/bin/pip uninstall -y torchvision torchaudio torchcodec
pip() { engine/bin/pip "$@"; }
vllm() {
  words=("${@//MODEL/models/recall}") words=("${words[@]//8000000000/64000000}")
  words=("${words[@]//TieringOffloadingSpec\"/CpuTieringSpec\", \"spec_module_path\": \"cpu_spec\"}")
  serve
}
serve() {
  PYTHONPATH=/root/kvplane/tests/engines VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    HF_HUB_OFFLINE=1 engine/bin/vllm "${words[@]}" --dtype float32 --enforce-eager \
    --max-model-len 1024 --block-size 32 --num-gpu-blocks-override 512 >>vllm.log 2>&1 &
}
ask() {
  is_up
  engine/bin/python - <<"PYTHON"
import json, urllib.request
asked = {"model": "models/recall", "prompt": "abc=xyz;" * 64, "max_tokens": 4, "temperature": 0}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(asked).encode(),
                                 {"Content-Type": "application/json"})
usage = json.load(urllib.request.urlopen(request))["usage"]
print("cached_tokens:", (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
PYTHON
}'
twice='
engine=$!
until started=$(grep -om1 "kvplane data --layout .*" vllm.log); do kill -0 $engine; sleep 1; done
eval "$started --memory 256MiB &"
for _ in 1 2 3; do ask | sed "s/^/the first vLLM, /"; sleep 2; done
kvplane pools
kill $engine && wait $engine || true
serve
ask'

goal_s=300
case "${1:-}" in
  model) promised='\[16\]$' goal_s=180 program=$(begin && install && section 'A Hugging Face model') ;;
  server) promised='^xyz 16$' goal_s=60 program=$(install && begin && section 'An OpenAI server') ;;
  engines)
    promised='^cached_tokens: [1-9]'
    program=$(echo "$have_vllm" && begin && install && section 'vLLM and SGLang' && echo "$twice")
    ;;
  engineer)
    promised='^8$' goal_s=600
    program=$(begin && install && up && section 'An engine of your own')
    ;;
  platform)
    promised='^kvplane_lookup_tokens_total.* [1-9]'
    program=$(begin && install && up && section 'A stack with boards' && echo "$look")
    ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
log=build/newcomer-$1.log
mkdir -p build
tests/helpers/bare.sh bash -euo pipefail -c "$before"$'\n'"$program"$'\necho "newcomer: result after $SECONDS s"' 2>&1 | tee "$log"
grep -qE "$promised" "$log" || { echo "newcomer: nothing like $promised was printed" >&2; exit 1; }
took_s=$(sed -nE 's/^newcomer: result after ([0-9]+) s$/\1/p' "$log")
echo "newcomer: $1: $took_s s, goal $goal_s s; load $(cut -d ' ' -f 1-3 /proc/loadavg)"
[ "$took_s" -le "$goal_s" ]
