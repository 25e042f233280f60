#!/usr/bin/env bash
# Does what README.md shows to one of its readers, in a bare Debian and with the wheels in dist/,
# and prints the seconds until the result that it promises: make wheels && scripts/newcomer.sh ROLE
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
packages() {
  echo "apt-get update -qq"
  echo "apt-get install -qq -y $(grep -oPm1 '`apt install \K[^`]*' README.md) >/dev/null"
}
install() {
  packages
  section Start
  echo 'echo "newcomer: installed after $SECONDS s"'
}

goal_s=300
case "${1:-}" in
  model)
    promised='\[16\]$' goal_s=180
    program=$(begin && install && section 'A Hugging Face model')
    ;;
  server) promised='^xyz 16$' goal_s=60 program=$(install && begin && section 'An OpenAI server') ;;
  engines)
    promised='^cached_tokens: [1-9]'
    program=$(
      packages && echo '. /root/kvplane/tests/engines/newcomer.sh' && begin && install
      section 'vLLM and SGLang' && echo ask_after_a_restart
    )
    ;;
  engineer)
    promised='^8$' goal_s=600
    program=$(begin && install && up && section 'An engine of your own')
    ;;
  platform)
    promised='^kvplane_lookup_tokens_total.* [1-9]'
    program=$(begin && install && up && section 'A stack with boards' && echo look)
    ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
log=build/newcomer-$1.log
mkdir -p build
tests/helpers/bare.sh bash -euo pipefail -c ". /root/kvplane/tests/helpers/newcomer.sh
$program
echo \"newcomer: result after \$SECONDS s\"" 2>&1 | tee "$log"
grep -qE "$promised" "$log" || { echo "newcomer: nothing like $promised was printed" >&2; exit 1; }
took_s=$(sed -nE 's/^newcomer: result after ([0-9]+) s$/\1/p' "$log")
echo "newcomer: $1: $took_s s, goal $goal_s s; load $(cut -d ' ' -f 1-3 /proc/loadavg)"
[ "$took_s" -le "$goal_s" ]
