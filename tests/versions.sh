#!/usr/bin/env bash
# Runs the tests on another version of torch, with its own triton, without a GPU:
#
#   tests/versions.sh VERSION [FOLDER [PYTEST ARGUMENT...]]
#
# VERSION is such as 2.14 (the newest 2.14 there is) or 2.14.1, or the word newest. The virtual
# environment is made in FOLDER and kept, for a second run that installs nothing; without FOLDER it
# is temporary. What to test is given to pytest: by default recognition, the operator, and
# everything from torch.compile to numbers. PYTHON names the interpreter, python3 by default.
#
# Exits as pytest does, and with 69 if the version cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?usage: tests/versions.sh VERSION [FOLDER [PYTEST ARGUMENT...]]}
environment=${2:-}
shift $(($# < 2 ? $# : 2))
tests=("$@")
[[ ${#tests[@]} -gt 0 ]] || tests=(
  tests/test_{recognition,decomposed,layout,golden,graph_pass}.py
  tests/test_{op,reference,launch,aot,lowering,generated_code,kernel_interpreter}.py
  tests/test_{selfcheck,backend,end_to_end,unchanged,models,modes_of_use,faults,caches}.py
)

if [[ -z $environment ]]; then
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
fi
python=$environment/bin/python

case $version in
  newest) wanted=torch ;;
  *.*.*) wanted=torch==$version ;;
  *) wanted=torch==$version.* ;;
esac

if [[ ! -x $python ]]; then
  "${PYTHON:-python3}" -m venv "$environment"
fi
if ! "$python" -I - "$version" <<'END'
import importlib.metadata, importlib.util, sys
needed = ("torch", "triton", "transformers", "pytest", "hypothesis", "expecttest", "fusion_pass")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
found = "" if "torch" in missing else importlib.metadata.version("torch").partition("+")[0]
outdated = sys.argv[1] == "newest" or not f"{found}.".startswith(f"{sys.argv[1]}.")
sys.exit(bool(missing) or outdated)
END
then
  # One resolution, so that torch's own pin chooses triton; the CPU build has none.
  "$environment/bin/pip" install --quiet --upgrade pip &&
    "$environment/bin/pip" install --quiet --upgrade "$wanted" --editable '.[test]' || exit 69
fi

# Compiled code of another version must not serve this one's tests.
caches=$(mktemp -d)
status=0
TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton CUDA_VISIBLE_DEVICES='' \
  "$python" -m pytest -q "${tests[@]}" || status=$?
rm -rf "$caches"

"$python" -I - "$status" <<'END'
import importlib.metadata as metadata, platform, sys
versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
print("Python", platform.python_version(), *(f"{k} {v}" for k, v in versions.items()), end=": ")
print("passed" if sys.argv[1] == "0" else "FAILED")
END
exit "$status"
