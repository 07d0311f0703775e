#!/usr/bin/env bash
# Measures this library on a machine with one GPU, in four parts of at most eight minutes each.
#
#   benchmarks/gpu_session.sh A     build, doctor, rates of products, copies and attention, tests of the kernels
#   benchmarks/gpu_session.sh B     training steps of the native models
#   benchmarks/gpu_session.sh C     training steps through MerakTrainer, and beside it HuggingFace's Trainer
#   benchmarks/gpu_session.sh D     training parity, speed of the kernels, predicted beside measured step times
#
#   --out DIR         where results go, each as soon as it is there ($OUT, else build/gpu_session)
#   --within SECONDS  of this part (480); what would not end in time is left out, by name
#   --device cpu      tiny shapes on this CPU: does everything run?
#   --only PATTERN    only steps whose name has this (an extended regular expression)
#
# A part that is called again does what is missing or failed. Results and built objects are kept in build/gpu_session, too:
# to go on at another machine, take that folder (or what $OUT returned) there. Needs Python with torch, transformers and
# pytest, a C++ compiler and nvcc; no make, no network. PYTHON=... names another Python. A status other than 0: something
# failed, or was left out.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' benchmarks/gpu_session.sh; }
refuse() { printf 'gpu_session.sh: %s\n' "$1" >&2; exit 2; }

part='' device=cuda within=480 only='' out=${OUT:-}
while (($#)); do
    case $1 in
    A | B | C | D) part=$1 ;;
    -h | --help) usage; exit ;;
    --device | --within | --only | --out)
        (($# > 1)) || refuse "$1: its value is missing. See --help."
        declare "${1#--}=$2"
        shift
        ;;
    *) refuse "$1: there is no such part or option. Use A, B, C or D, and see --help." ;;
    esac
    shift
done
[[ -n $part ]] || refuse "the part is missing. Use A, B, C or D, and see --help."
[[ $device == cuda || $device == cpu ]] || refuse "--device $device: there is no such one. Use cuda or cpu."
[[ $within =~ ^[1-9][0-9]*$ ]] || refuse "--within $within: it is not a number of seconds. Use 480, say."

KEEP=$PWD/build/gpu_session PYTHON=${PYTHON:-$(command -v python3 || command -v python)}
[[ $device == cpu ]] && KEEP=${out:-${KEEP}_cpu} # a trial leaves alone what was measured
out=$(realpath -m "${out:-$KEEP}")
mkdir -p "$out" "$KEEP"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
END=$((SECONDS + within)) FAILED=() LEFT=()

copy() { [[ $1 -ef $2 ]] || find "$1" -maxdepth 1 -type f -exec cp -pu -t "$2" {} +; }
trap 'copy "$out" "$KEEP"' EXIT
left() { echo $((END - SECONDS - 5)); }

# step NAME SECONDS COMMAND...: run it within that time and what is left; NAME.log is what it says, NAME.json how it ended.
step() {
    local name=$1 limit=$2 status=ok rc=0 began=$SECONDS
    shift 2
    [[ $name =~ $only ]] || return 0
    if grep -q '"status": "ok"' "$out/$name.json" 2>/dev/null; then
        echo "== $name: there already"
        return 0
    fi
    if (($(left) < 10)); then
        LEFT+=("$name")
        return 0
    fi
    echo "== $name"
    timeout -k 5 "$((limit < $(left) ? limit : $(left)))" "$@" >"$out/$name.log" 2>&1 || rc=$?
    case $rc in
    0) ;;
    124 | 137) status="too slow" ;;
    *) status=failed ;;
    esac
    [[ $status == ok ]] || FAILED+=("$name")
    printf '{"step": "%s", "status": "%s", "rc": %d, "seconds": %d}\n' \
        "$name" "$status" "$rc" "$((SECONDS - began))" >"$out/$name.json"
    tail -n "$([[ $status == ok ]] && echo 12 || echo 30)" "$out/$name.log"
    echo "== $name: $status after $((SECONDS - began)) s"
    copy "$out" "$KEEP"
}

# rows NAME REGEX: training steps of benchmarks/gpu_step.py, each with a file of its own, in all the time that is left.
rows() {
    [[ $1 =~ $only ]] || return 0
    if (($(left) < 30)); then
        LEFT+=("$1")
        return 0
    fi
    echo "== $1"
    $PYTHON benchmarks/gpu_step.py --out "$out" --device $device --only "$2" --within "$(left)" "${QUICK[@]}" 2>&1 |
        tee "$out/$1.log"
    ((PIPESTATUS[0] == 0)) || FAILED+=("$1")
    grep -q '^left out' "$out/$1.log" && LEFT+=("$1")
    copy "$out" "$KEEP"
}

# tests FILE SECONDS [ARGUMENTS]: a file of tests/gpu; none may be skipped where there is a GPU.
tests() {
    local file=$1 limit=$2 HOW=(-v --maxfail 5 --durations 5 -o faulthandler_timeout=45) # a hang shows its stacks
    shift 2
    if [[ $device == cuda ]]; then
        step "$file" "$limit" $PYTHON -m pytest "${HOW[@]}" -m gpu --no-skip "tests/gpu/$file.py" "$@"
    else # status 5: all of this file needs a GPU
        step "$file" "$limit" sh -c \
            '"$@" || [ $? = 5 ]' sh $PYTHON -m pytest "${HOW[@]}" -m "not gpu" "tests/gpu/$file.py" "$@"
    fi
}

built() { compgen -G "megatron_merak/$([[ $device == cuda ]] && echo _ops_cuda || echo _C)*.so"; }

build() {
    built >/dev/null || cp -p "$KEEP"/built/*.so megatron_merak/ 2>/dev/null
    if ! built >/dev/null; then
        rm -f "$out"/build*.json
        local cuda=$([[ $device == cuda ]] && echo 1 || echo 0)
        step build 300 env TORCH_CUDA_ARCH_LIST=9.0 MERAK_STRICT=1 MERAK_CUDA=$cuda $PYTHON setup.py build_ext --inplace
        built >/dev/null || step build_what_compiles 200 \
            env TORCH_CUDA_ARCH_LIST=9.0 MERAK_CUDA=$cuda $PYTHON setup.py build_ext --inplace
    fi
    mkdir -p "$KEEP/built" "$out/built"
    cp -pu megatron_merak/*.so "$KEEP/built/" 2>/dev/null
    [[ $KEEP -ef $out ]] || cp -pu megatron_merak/*.so "$out/built/" 2>/dev/null
}

copy "$KEEP" "$out"
PROFILE=$out/device_profile.json QUICK=() SMALL=() KERNELS=(--out "$out/kernels.json")
[[ $device == cpu ]] && QUICK=(--steps 1) SMALL=(--tiny) KERNELS=(--check)
build
case $part in
A)
    step doctor 60 $PYTHON tools/doctor.py
    step rates 120 $PYTHON benchmarks/calibrate.py --device $device "${SMALL[@]}" --into "$PROFILE"
    for file in test_reductions_gpu test_mailbox_gpu test_all_reduce_gpu test_captured_gpu test_pointwise_gpu; do
        tests $file 120
    done
    ;;
B) rows native ' native ' ;;
C) rows trainers ' (trainer|hf|hf-compile|hf-liger|hf-recompute|megatron|captured) ' ;;
D)
    tests test_training_gpu 150
    step rates 120 $PYTHON benchmarks/calibrate.py --device $device "${SMALL[@]}" --into "$PROFILE"
    rm -f "$out/predicted.json" # of all rows that there are by now
    step predicted 60 $PYTHON benchmarks/calibrate.py --device $device --profile "$PROFILE" --beside "$out"
    step kernels 200 $PYTHON benchmarks/gpu_ops.py "${KERNELS[@]}"
    rows rest .
    ;;
esac
step_table=$($PYTHON benchmarks/gpu_page.py "$out" 2>&1) && echo "$step_table" || echo "no table: ${step_table##*$'\n'}"
copy "$out" "$KEEP"
((${#FAILED[@]} == 0)) || echo "part $part, failed or too slow: ${FAILED[*]} (see their .log in $out)"
((${#LEFT[@]} == 0)) || echo "part $part, left out after $within s: ${LEFT[*]}; call it again to go on"
echo "part $part took $SECONDS s of $within; results are in $out"
((${#FAILED[@]} + ${#LEFT[@]} == 0))
