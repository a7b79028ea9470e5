#!/bin/bash
# run-gpu-tests.sh [flags] [BUNDLE]: runs gorun's tests, examples and benchmark on a machine with GPUs that has no Go.
# It needs bash, coreutils and tar; xz or python3 to unpack. -h shows the flags.
set -u
export -n LC_ALL # the programs' locale stays the user's
LC_ALL=C

usage() {
	cat <<'TEXT'
run-gpu-tests.sh [flags] [BUNDLE]

Runs what make gpu-bundle has put into BUNDLE (default: the folder of this script), and goes on
after failures. Writes at most 8 files, 16 MiB in all:

  results.json   each step: name, status, exit code, seconds, last lines, tests that were skipped
  figures.json   what the benchmark measured, with the machine's facts
  facts.txt      GPUs, driver, libraries, kernel
  logs.tar.gz    the output of each step

Exit code 0: nothing failed; 1: a step failed; 2: wrong command line or bundle; 130, 143: ended by a
signal, with the files as far as it came.

  --no-multicast  keep NVLink multicast off: exports NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1
                  and TORCH_SYMM_MEM_DISABLE_MULTICAST=1
  --out DIR       where the files go (default gpu-results)
  --quick         fewer sizes and rounds; go test -short
  --all           the tests of packages that use no GPU, too, and those of stand-ins for the driver and NCCL
  --only PATTERN  only steps whose name matches this regular expression; may be repeated
  --timeout S     seconds for each step (default 900)
  --pairs         with 4 GPUs or more, the tests of several packages at once, each on two GPUs of its
                  own; tests that want more than two are skipped there
  --share         ranks share GPUs where there are fewer: tests and examples on several ranks run on one
                  GPU, slowly, with NCCL's ranks joined by sockets; what needs a GPU for each is skipped
  --np LIST       numbers of ranks for examples and benchmark, as far as there are GPUs (default "1 2")
  --list          print the names of the steps and do nothing

With GORUN_DEVICE=host all runs on the host platform. Otherwise a machine without a GPU is a failure
(GORUN_REQUIRE_GPU=1).
TEXT
}

die() {
	printf 'run-gpu-tests: %s\n' "$1" >&2
	exit 2
}

bundle=
out=gpu-results
quick=
all=
only=()
seconds=900
nps="1 2"
share=
list=
pairs=
multicast=
while [ $# -gt 0 ]; do
	case $1 in
	--out | --only | --timeout | --np)
		[ $# -ge 2 ] || die "$1 needs a value; -h shows the flags"
		;;
	esac
	case $1 in
	-h | --help) usage; exit 0 ;;
	--no-multicast) multicast=off ;;
	--out) out=$2; shift ;;
	--quick) quick=1 ;;
	--all) all=1 ;;
	--pairs) pairs=1 ;;
	--share) share=1 ;;
	--only) only+=("$2"); shift ;;
	--timeout) seconds=$2; shift ;;
	--np) nps=$2; shift ;;
	--list) list=1 ;;
	-*) die "unknown flag $1; -h shows the flags" ;;
	*)
		[ -z "$bundle" ] || die "more than one bundle: $bundle and $1"
		bundle=$1
		;;
	esac
	shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--timeout $seconds: want whole seconds"
[[ $nps =~ ^[1-9][0-9]*(\ [1-9][0-9]*)*$ ]] || die "--np \"$nps\": want numbers"
for p in ${only[@]+"${only[@]}"}; do
	[[ x =~ $p ]]
	[ $? -ne 2 ] || die "--only $p: not a regular expression"
done
[ -n "$bundle" ] || bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d "$bundle" ] || die "no folder $bundle"
bundle=$(cd "$bundle" && pwd)

if [ -n "$multicast" ]; then
	export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
fi

# Where the programs are: unpacked beside this script, or in an archive.
work=$(mktemp -d) || die "no temporary folder"
step_pid=
lane_pid=() # of steps that run side by side; "": free
finish() {
	local pid
	for pid in "$step_pid" ${lane_pid[@]+"${lane_pid[@]}"}; do
		[ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null
	done
	[ -z "$logs" ] || [ -n "$packed" ] || pack
	rm -rf "$work"
}
logs= packed=
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if [ -d "$bundle/bin" ] && [ -d "$bundle/src" ]; then
	root=$bundle
elif [ -f "$bundle/bundle.tar.xz" ]; then
	root=$work/bundle
	mkdir "$root"
	if command -v xz >/dev/null; then
		xz -dc "$bundle/bundle.tar.xz" | tar xf - -C "$root"
	elif command -v python3 >/dev/null; then
		python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer, 1 << 20)' "$bundle/bundle.tar.xz" | tar xf - -C "$root"
	else
		die "to unpack $bundle/bundle.tar.xz xz or python3 is needed; or make gpu-bundle PACK=gz"
	fi
	[ "${PIPESTATUS[*]}" = "0 0" ] || die "unpack $bundle/bundle.tar.xz: it is damaged, or the disk is full"
elif [ -f "$bundle/bundle.tar.gz" ]; then
	root=$work/bundle
	mkdir "$root"
	tar xzf "$bundle/bundle.tar.gz" -C "$root" || die "unpack $bundle/bundle.tar.gz: it is damaged, or the disk is full"
else
	die "$bundle holds no bundle; make gpu-bundle writes one"
fi
export PATH=$root/bin:$PATH

# pack makes one file of the logs; what would be too large is cut further.
pack() {
	[ -z "$list" ] || return 0
	while :; do
		if command -v gzip >/dev/null; then
			tar czf "$out/logs.tar.gz" -C "$work" logs
		else
			tar cf "$out/logs.tar.gz" -C "$work" logs # for its readers' sake under the same name: tar xf takes either
		fi
		packed=1
		[ "$(stat -c %s "$out/logs.tar.gz")" -gt $((14 << 20)) ] && [ $keep -gt 1024 ] || return 0
		keep=$((keep / 4))
		local log
		for log in "$logs"/*; do
			tail -c $keep "$log" >"$log.cut" && mv "$log.cut" "$log"
		done
	done
}

# How many GPUs there are. A host run has as many devices as it wants.
gpus=0
skips= # the subtests that are left out
if [ "${GORUN_DEVICE:-}" = host ]; then
	gpus=1024
else
	# Stand-ins prove nothing of this machine, and other machines run them.
	[ -n "$all" ] || skips='/^fake$|//^fake$|///^fake$|////^fake$|/////^fake$'
	export GORUN_REQUIRE_GPU=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
	if command -v nvidia-smi >/dev/null; then
		while IFS= read -r line; do
			[[ $line != "GPU "* ]] || gpus=$((gpus + 1))
		done < <(timeout 60 nvidia-smi -L 2>/dev/null)
	else
		for f in /dev/nvidia[0-9]*; do [ -e "$f" ] && gpus=$((gpus + 1)); done
	fi
fi

room=$gpus # for how many ranks
binding=()
if [ -n "$share" ] && [ "${GORUN_DEVICE:-}" != host ]; then
	export GORUN_TEST_SHARE_GPUS=1
	binding=(--gpu-bind share)
	[ "$gpus" -eq 0 ] || room=1024
fi

mkdir -p "$work/logs" "$work/tmp"
[ -n "$list" ] || mkdir -p "$out" || die "make $out: no"
logs=$work/logs
export TMPDIR=$work/tmp

# quote makes a JSON string of text. Bytes that are not printing ASCII become "?".
quote() {
	local s
	s=$(printf '%s' "$1" | tr -c '\n\t\040-\176' '?')
	s=${s//\\/\\\\}
	s=${s//\"/\\\"}
	s=${s//$'\t'/\\t}
	s=${s//$'\n'/\\n}
	printf '"%s"' "$s"
}

now_ms() {
	local t
	t=$(date +%s%N)
	echo $((t / 1000000))
}

started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
results=()
failed=()
count=0
passed=0
skipped=0

wanted() {
	[ ${#only[@]} -eq 0 ] && return 0
	local p
	for p in "${only[@]}"; do
		[[ $1 =~ $p ]] && return 0
	done
	return 1
}

# record NAME STATUS CODE MILLISECONDS TEXT [WHY]; tests_skipped are the tests of a binary that did not run.
tests_skipped=()
record() {
	local skips= sep= t
	for t in ${tests_skipped[@]+"${tests_skipped[@]}"}; do
		skips+=$sep$(quote "$t")
		sep=", "
	done
	count=$((count + 1))
	results+=("$(printf '{"name": %s, "status": "%s", "rc": %d, "seconds": %d.%03d, "last": %s, "tests_skipped": [%s]}' \
		"$(quote "$1")" "$2" "$3" $(($4 / 1000)) $(($4 % 1000)) "$(quote "$5")" "$skips")")
	case $2 in
	passed) passed=$((passed + 1)) ;;
	failed) failed+=("$1") ;;
	skipped) skipped=$((skipped + 1)) ;;
	esac
	local more=${6:-}
	[ ${#tests_skipped[@]} -eq 0 ] || more="   ${#tests_skipped[@]} tests skipped"
	printf '%-7s %-32s %4d.%03d s%s\n' "$2" "$1" $(($4 / 1000)) $(($4 % 1000)) "$more"
	[ "$2" != failed ] || printf '%s\n' "$5" | tail -n 8 | while IFS= read -r line; do printf '        %.300s\n' "$line"; done
	write_results
}

# The files are written after each step, so that they are there whatever happens to the next.
write_results() {
	{
		printf '{"started": "%s", "version": %s, "multicast": "%s", "device": %s, "gpus": %d,\n' "$started" "$(quote "$(cat "$bundle/VERSION" 2>/dev/null)")" \
			"${multicast:-unchanged}" "$(quote "${GORUN_DEVICE:-gpu}")" "$gpus"
		printf ' "passed": %d, "failed": %d, "skipped": %d,\n "steps": [' "$passed" "${#failed[@]}" "$skipped"
		local i sep=
		for i in ${results[@]+"${results[@]}"}; do
			printf '%s\n  %s' "$sep" "$i"
			sep=,
		done
		printf '\n ]}\n'
	} >"$out/results.json.new" && mv "$out/results.json.new" "$out/results.json"
}

log_limit=$((64 << 20)) # of one step, while it runs
keep=$((256 << 10))     # of it, at each end, afterwards

# failures picks the lines at which tests say that they failed, with what they printed just before and behind, at most 80.
failures() {
	local line more=0 n=0 before=()
	while IFS= read -r line && [ $n -lt 80 ]; do
		if [[ $line =~ ^(\ *---\ FAIL|panic:|fatal\ error:) ]]; then
			[ ${#before[@]} -eq 0 ] || printf '%s\n' "${before[@]}"
			n=$((n + ${#before[@]})) before=() more=7
		fi
		if [ $more -gt 0 ]; then
			printf '%s\n' "$line"
			more=$((more - 1)) n=$((n + 1))
		elif [[ $line =~ ^===\ RUN ]]; then
			before=()
		else
			before+=("$line")
			[ ${#before[@]} -le 8 ] || before=("${before[@]:1}")
		fi
	done
}

log_of() { printf '%s' "$logs/${1//[^a-zA-Z0-9_.-]/_}.log"; }

# begin NAME FOLDER COMMAND...: starts it there, bounded in time and output; began is its process.
begin() {
	local name=$1 dir=$2 log
	shift 2
	log=$(log_of "$name")
	: >"$log"
	(cd "$dir" && exec timeout -k 10 "$seconds" "$@") >"$log" 2>&1 </dev/null &
	began=$!
	# It ends by itself, within a second after the step: a signal to a subshell that has not yet put its traps back would run this shell's.
	(while sleep 1 && kill -0 "$began"; do
		if [ "$(stat -c %s "$log")" -gt "$log_limit" ]; then
			echo >"$log.full"
			kill -TERM "$began"
			exit
		fi
	done) >/dev/null 2>&1 </dev/null &
}

# conclude NAME CODE FROM: records what has ended, begun at FROM (now_ms). It returns the exit code that counts.
conclude() {
	local name=$1 code=$2 from=$3 why= log
	log=$(log_of "$name")
	if [ -e "$log.full" ]; then
		why="ended: more than $((log_limit >> 20)) MiB of output"
		[ $code -ne 0 ] || code=125
		rm "$log.full"
	elif [ $code -eq 124 ] || [ $code -eq 137 ]; then
		why="ended after $seconds s, --timeout (or by SIGKILL)"
	fi
	local took=$(($(now_ms) - from))
	if [ "$(stat -c %s "$log")" -gt $((2 * keep)) ]; then
		{ head -c $keep "$log"; printf '\n... cut here: %d bytes in all ...\n' "$(stat -c %s "$log")"; tail -c $keep "$log"; } >"$log.cut"
		mv "$log.cut" "$log"
	fi
	[ -z "$why" ] || printf '%s\n' "$why" >>"$log"
	tests_skipped=()
	local line
	while IFS= read -r line; do
		[[ ! $line =~ ^\ *---\ SKIP:\ ([^\ ]+) ]] || tests_skipped+=("${BASH_REMATCH[1]}")
		[ ${#tests_skipped[@]} -lt 100 ] || break
	done < <(tr -d '\000' <"$log")
	local last
	last=$(tail -c 4096 "$log" | tr -d '\000' | tail -n 20)
	if [ $code -eq 0 ]; then
		record "$name" passed 0 "$took" "$(printf '%s' "$last" | tail -n 3)"
	else
		# A test binary says where it failed long before its end.
		local fails
		fails=$(tr -d '\000' <"$log" | failures | head -c 6000)
		[ -z "$fails" ] || last="$fails"$'\n...\n'"$(printf '%s' "$last" | tail -n 5)"
		record "$name" failed "$code" "$took" "$last"
	fi
	tests_skipped=()
	return $code
}

# step NAME FOLDER COMMAND...: runs it there.
step() {
	local name=$1 from code
	wanted "$name" || return 0
	if [ -n "$list" ]; then
		printf '%s\n' "$name"
		return 0
	fi
	from=$(now_ms)
	begin "$@"
	step_pid=$began
	wait "$step_pid"
	code=$?
	step_pid=
	conclude "$name" $code "$from"
}

# Lanes: pairs of GPUs on which steps run side by side.
lane_devices=()
lane_name=()
lane_from=()

make_lanes() {
	local all i
	IFS=, read -ra all <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
	for ((i = 0; i + 1 < ${#all[@]} && i + 1 < gpus; i += 2)); do
		lane_devices+=("${all[i]},${all[i + 1]}")
		lane_pid+=("")
	done
}

# side_step NAME FOLDER COMMAND...: a step in the next free lane; it does not wait for its end.
side_step() {
	local name=$1 i
	if [ ${#lane_pid[@]} -lt 2 ]; then
		step "$@"
		return
	fi
	wanted "$name" || return 0
	if [ -n "$list" ]; then
		printf '%s\n' "$name"
		return 0
	fi
	while :; do
		for i in "${!lane_pid[@]}"; do
			[ -z "${lane_pid[i]}" ] && break 2
		done
		end_lane
	done
	lane_name[i]=$name
	lane_from[i]=$(now_ms)
	CUDA_VISIBLE_DEVICES=${lane_devices[i]} begin "$@"
	lane_pid[i]=$began
}

# end_lane waits for a step in a lane to end; it returns 1 if there is none.
end_lane() {
	local i running
	while :; do
		running=
		for i in "${!lane_pid[@]}"; do
			[ -n "${lane_pid[i]}" ] || continue
			running=1
			if ! kill -0 "${lane_pid[i]}" 2>/dev/null; then
				wait "${lane_pid[i]}"
				local code=$?
				lane_pid[i]=
				conclude "${lane_name[i]}" $code "${lane_from[i]}"
				return 0
			fi
		done
		[ -n "$running" ] || return 1
		sleep 0.2
	done
}

# skip NAME WHY
skip() {
	wanted "$1" || return 0
	if [ -n "$list" ]; then
		printf '%s\n' "$1"
		return 0
	fi
	record "$1" skipped 0 0 "$2" "   $2"
}

facts() {
	echo "date $started"
	echo "kernel $(uname -srm)"
	echo "cores $(nproc)"
	[ -r /proc/meminfo ] && head -n 3 /proc/meminfo
	echo
	if command -v nvidia-smi >/dev/null; then
		timeout 60 nvidia-smi --query-gpu=index,name,uuid,pci.bus_id,driver_version,memory.total,mig.mode.current,clocks.sm,clocks.mem --format=csv
		timeout 60 nvidia-smi topo -m
	else
		echo "no nvidia-smi"
	fi
	[ -r /proc/driver/nvidia/version ] && cat /proc/driver/nvidia/version
	echo
	echo "libraries:"
	local f seen=" " real
	for f in ${GORUN_CUDA_LIB:+"$GORUN_CUDA_LIB"} ${GORUN_NCCL_LIB:+"$GORUN_NCCL_LIB"} \
		/usr/lib/*-linux-gnu/lib{cuda,nccl,nvrtc}.so* /usr/lib64/lib{cuda,nccl,nvrtc}.so* /usr/local/nvidia/lib*/libcuda.so* \
		/usr/local/cuda*/lib64/lib{nccl,nvrtc}.so* /opt/*/lib/lib{nccl,rccl}.so* \
		{${VIRTUAL_ENV:-/usr},${CONDA_PREFIX:-/usr},/usr,/usr/local,/opt/*,/opt/*/.venv}/lib/python3*/*-packages/nvidia/{nccl,cu13,cuda_nvrtc}/lib/lib{nccl,nvrtc}.so*; do
		[ -f "$f" ] || continue
		real=$(readlink -f "$f")
		[[ $seen == *" $real "* ]] && continue
		seen="$seen$real "
		echo "  $f -> $real ($(stat -c %s "$real") bytes)"
	done
	echo
	echo "settings:"
	env | while IFS= read -r f; do
		[[ ! $f =~ ^(NCCL_|CUDA_|GORUN_|NVSHMEM_|TORCH_) ]] || printf '  %.400s\n' "$f"
	done | sort | head -c 8192
}
[ -n "$list" ] || facts >"$out/facts.txt" 2>&1

# Tests. A binary runs in its package's folder, as go test does it.
short=
[ -z "$quick" ] || short=-test.short
test_step() { # PACKAGE PART SKIP [FLAGS]; PART, in the step's name, is of the tests that SKIP, a pattern, and the flags choose
	local pkg=$1 part=$2 skip=$3 bin
	shift 3
	skip+=${skip:+${skips:+|}}$skips
	bin=./${pkg##*/}.test
	[ -f "$root/src/$pkg/$bin" ] || { skip "test $pkg$part" "not in the bundle"; return; }
	side_step "test $pkg$part" "$root/src/$pkg" "$bin" -test.v -test.timeout "$((seconds > 20 ? seconds - 10 : seconds))s" $short ${skip:+-test.skip "$skip"} "$@"
}
gpu_packages="cuda/dl cuda/internal/cusys nccl/internal/ncclsys cuda nccl graphs examples/train"
test_bench() { test_step cmd/gorun-bench " library" "" -test.run '^Test(Library|Registration)'; }
if [ -n "$pairs" ]; then
	[ "${GORUN_DEVICE:-}" = host ] || make_lanes
	[ -n "$list" ] || [ ${#lane_pid[@]} -ge 2 ] || echo "--pairs: fewer than 4 GPUs, so one package after the other"
fi
if [ ${#lane_pid[@]} -ge 2 ]; then
	# What takes longest begins first, and graphs is divided.
	test_step nccl "" ""
	test_step graphs " library" "" -test.run '^TestLibrary'
	test_step graphs " others" '^TestLibrary'
	for pkg in $gpu_packages; do
		case $pkg in nccl | graphs) ;; *) test_step "$pkg" "" "" ;; esac
	done
	test_bench
	while end_lane; do :; done
	lane_pid=() # the other steps are one after the other
else
	for pkg in $gpu_packages; do
		test_step "$pkg" "" ""
	done
	test_bench
fi

# Examples, on as many ranks as there are GPUs for.
for np in $nps; do
	for prog in "$root"/bin/*; do
		name=${prog##*/}
		case $name in gorun | gorun-bench | train) continue ;; esac
		if [ "$np" -gt "$room" ]; then
			skip "example $name np$np" "$gpus GPUs"
			continue
		fi
		step "example $name np$np" "$work" gorun -np "$np" ${binding[@]+"${binding[@]}"} "$prog"
	done
done

# Training on GPUs and on the host platform has to come to the same losses.
if [ -f "$root/bin/train" ]; then
	rows=20000 epochs=5
	[ -z "$quick" ] || rows=4000 epochs=2
	data=$work/train.csv
	# losses NAME: the losses of a step, in units of 1e-9
	losses() {
		local line v
		while IFS= read -r line; do
			[[ $line =~ ^epoch\ .*loss\ +([0-9.eE+-]+) ]] || continue
			v=$(printf '%.9f' "${BASH_REMATCH[1]}") || return 1
			printf '%d\n' "$((10#${v/./}))"
		done <"$logs/example_train_$1.log"
	}
	for np in $nps; do
		name="example train np$np"
		if [ "$np" -gt "$room" ]; then
			skip "$name" "$gpus GPUs"
			continue
		fi
		wanted "$name" || wanted "$name host" || wanted "$name losses" || continue
		[ -n "$list" ] || [ -f "$data" ] || gorun -np 1 --device host train -write "$data" -rows $rows >/dev/null
		step "$name" "$work" gorun -np "$np" ${binding[@]+"${binding[@]}"} train -data "$data" -epochs $epochs
		step "$name host" "$work" gorun -np "$np" --device host train -data "$data" -epochs $epochs
		wanted "$name losses" || continue
		if [ -n "$list" ]; then
			echo "$name losses"
			continue
		fi
		mapfile -t a < <(losses "np$np" 2>&1)
		mapfile -t b < <(losses "np${np}_host" 2>&1)
		state=passed
		[ ${#a[@]} -eq $epochs ] && [ ${#b[@]} -eq $epochs ] || state=failed
		for ((i = 0; i < ${#a[@]} && i < ${#b[@]}; i++)); do
			if [[ ${a[i]} =~ ^[0-9]+$ && ${b[i]} =~ ^[0-9]+$ ]]; then
				d=$((a[i] - b[i]))
				[ $((${d#-} * 1000)) -le "${b[i]}" ] || state=failed
			else
				state=failed
			fi
		done
		code=0
		[ $state = passed ] || code=1
		record "$name losses" $state $code 0 "by epoch, times 1e9: ${a[*]}; on the host platform: ${b[*]}"
	done
fi

# The benchmark. Its lines are JSON already.
figures=()
bench() { # NP FLAGS...
	local np=$1 name="bench np$1" line
	shift
	[ -f "$root/bin/gorun-bench" ] || { skip "$name" "not in the bundle"; return; }
	[ "$np" -le "$gpus" ] || { skip "$name" "$gpus GPUs"; return; }
	step "$name" "$work" gorun -np "$np" gorun-bench --json "$@"
	[ -f "$logs/bench_np$np.log" ] || return
	while IFS= read -r line; do
		[[ $line == '{'*'}' ]] && figures+=("$line")
	done <"$logs/bench_np$np.log"
}
for np in $nps; do
	if [ -n "$quick" ]; then
		bench "$np" -b 8 -e 1M -f 64 -w 2 -n 5 -r 3 -c
	else
		bench "$np" -b 8 -e 64M -f 4 -c
	fi
done

# Everything else, on the host platform. What needs Go is left out where there is none.
if [ -n "$all" ]; then
	nogo=
	command -v go >/dev/null || nogo=1
	while IFS= read -r f; do
		[ -f "$f" ] || continue
		f=${f#"$root/src/"}
		pkg=${f%/*}
		case " $gpu_packages " in *" $pkg "*) continue ;; esac
		skip=
		if [ -n "$nogo" ]; then
			case $pkg in
			examples) skip "test $pkg" "it builds programs, and Go is not there"; continue ;;
			cmd/gorun) skip='^(TestDependencies|TestImports|TestStatic)$|^TestScripts$/^gobuild$' ;;
			esac
		fi
		was=${GORUN_DEVICE-}
		export GORUN_DEVICE=host
		test_step "$pkg" "" "$skip"
		if [ -n "$was" ]; then GORUN_DEVICE=$was; else unset GORUN_DEVICE; fi
	done < <(shopt -s globstar nullglob && printf '%s\n' "$root"/src/**/*.test)
fi

[ -z "$list" ] || exit 0
if [ $count -eq 0 ]; then
	die "no step matches; --list prints their names"
fi

{
	printf '{"started": "%s", "facts": %s,\n "figures": [' "$started" "$(quote "$(head -c 16384 "$out/facts.txt")")"
	sep=
	for line in ${figures[@]+"${figures[@]}"}; do
		printf '%s\n  %s' "$sep" "$line"
		sep=,
	done
	printf '\n ]}\n'
} >"$out/figures.json"

pack
write_results
printf '\n%d passed, %d failed, %d skipped; files in %s\n' "$passed" "${#failed[@]}" "$skipped" "$out"
if [ ${#failed[@]} -gt 0 ]; then
	printf 'failed: %s\n' "${failed[@]}"
	exit 1
fi
exit 0
