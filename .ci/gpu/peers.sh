#!/bin/bash
# peers.sh [flags]: measures gorun-bench beside nccl-tests and PyTorch, interleaved, on one machine with GPUs. -h shows the flags.
set -u
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" || exit
me=peers
flags="nccl-tests mpirun python np rounds ops sizes modes seconds out bin"

usage() {
	cat <<'TEXT'
peers.sh [flags] --nccl-tests DIR

Measures collectives by gorun-bench, nccl-tests and PyTorch in rounds, one program after the other, and writes:

  peers.json   each tool's times of each operation, size and kind of calls, in each round; median,
               least, greatest; ratios of the medians and their geometric means; which bars are missed
  peers.txt    the same as a table
  raw.tar.gz   what each program printed (raw/ while it runs)

A signal that ends it has it write what there is.
Exit code 0: no bar is missed; 1: one is, or a program failed; 2: wrong command line.

  --nccl-tests DIR  where all_reduce_perf, all_gather_perf, reduce_scatter_perf, broadcast_perf and
                    sendrecv_perf are, built with MPI=1; "": without nccl-tests
  --mpirun CMD      starts them (default "mpirun.openmpi --allow-run-as-root")
  --python PATH     a Python with torch (default: without PyTorch)
  --np N            ranks (default 2)
  --rounds N        rounds (default 5)
  --ops LIST        of all-reduce,all-gather,reduce-scatter,broadcast,sendrecv (default: all)
  --sizes MIN:MAX:FACTOR
                    in bytes (default 8:1G:8)
  --modes LIST      of gorun-bench (default auto, what the runtime does by itself; the bars are for it)
  --seconds S       begin no round that would take longer than to S seconds from the start, and no
                    program after them (default 0: no limit)
  --out DIR         where the files go (default peers-results)
  --bin DIR         where gorun and gorun-bench are (default: bin beside this script or beside the
                    folder src that it is in, else the PATH)
  --no-multicast    keep NVLink multicast off: NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1 and
                    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in every process

Eager: 100 calls one after the other, then one wait; captured: a graph of 20 calls, launched 10 times,
then one wait; out of place, float32, sum. nccl-tests' graphs are launched for the first time in the
timed part, gorun's and PyTorch's before: about 1 % of 8-byte calls.
TEXT
}

np=2
rounds=5
ops=all-reduce,all-gather,reduce-scatter,broadcast,sendrecv
sizes=8:1G:8
modes=auto
tests=unset
python=
seconds=0
out=peers-results
parse "$@"
[[ $np =~ ^[1-9][0-9]*$ ]] || die "--np $np: want a number"
[[ $rounds =~ ^[1-9][0-9]?$ ]] || die "--rounds $rounds: want a number from 1 to 99"
[[ $seconds =~ ^[0-9]+$ ]] || die "--seconds $seconds: want whole seconds"
[[ $sizes =~ ^([0-9]+[KMG]?):([0-9]+[KMG]?):([0-9]+)$ ]] || die "--sizes $sizes: want MIN:MAX:FACTOR, such as 8:1G:8"
min=${BASH_REMATCH[1]} max=${BASH_REMATCH[2]} factor=${BASH_REMATCH[3]}

# perf OP is the operation's program in nccl-tests.
perf() {
	case $1 in
	all-reduce) echo all_reduce_perf ;;
	all-gather) echo all_gather_perf ;;
	reduce-scatter) echo reduce_scatter_perf ;;
	broadcast) echo broadcast_perf ;;
	sendrecv) echo sendrecv_perf ;;
	esac
}
[ "$tests" != unset ] || die "--nccl-tests DIR is missing; -h shows the flags"
IFS=, read -ra op_list <<<"$ops"
[ ${#op_list[@]} -gt 0 ] || die "--ops: none"
for op in "${op_list[@]}"; do
	prog=$(perf "$op")
	[ -n "$prog" ] || die "--ops: no operation $op"
	[ -z "$tests" ] || [ -x "$tests/$prog" ] || die "--nccl-tests $tests: no program $prog"
done
need gorun gorun-bench
surroundings
[ -z "$python" ] || command -v "$python" >/dev/null || die "--python: no program $python"

raw=$out/raw
[ ! -e "$raw" ] && [ ! -e "$out/peers.json" ] || die "--out $out: has results already"
mkdir -p "$raw" || die "make $raw: no"

# summary writes the files; its exit code is the script's.
summary() {
	local code
	trap '' INT TERM HUP # it is not begun twice
	gorun-bench compare -json "$out/peers.json" "$raw" >"$out/peers.txt"
	code=$?
	tar czf "$out/raw.tar.gz" -C "$out" raw && rm -r "$raw"
	cat "$out/peers.txt"
	return $code
}

child=
# ended CODE: by a signal.
ended() {
	trap '' INT TERM HUP
	if [ -n "$child" ]; then
		kill -TERM "$child" 2>/dev/null
		wait "$child" # at most the 5 s of timeout -k
	fi
	rm -f "$raw"/*.part "$raw"/*.err
	echo "ended by a signal after $SECONDS s" >>"$raw/left-out"
	summary
	exit "$1"
}
trap 'ended 130' INT
trap 'ended 143' TERM HUP

# over reports whether the time is up.
over() { [ "$seconds" -gt 0 ] && [ $SECONDS -ge "$seconds" ]; }

one=90 # seconds that a program may take

# measure NAME COMMAND...: runs it, bounded; its stdout is NAME.txt, or with its stderr NAME.failed. What has failed twice is not run again.
measure() {
	local name=$1 code from=$SECONDS before
	shift
	before=("$raw"/*."${name#*.}.failed")
	if [ ${#before[@]} -ge 2 ]; then
		echo "$name: failed twice before" >>"$raw/left-out"
		return
	fi
	if over; then
		echo "$name: $seconds s are over" >>"$raw/left-out"
		return
	fi
	timeout -k 5 $one "$@" >"$raw/$name.part" 2>"$raw/$name.err" </dev/null &
	child=$!
	wait "$child"
	code=$?
	child=
	if [ $code -eq 0 ]; then
		mv "$raw/$name.part" "$raw/$name.txt"
		rm "$raw/$name.err"
	else
		{ tail -c 65536 "$raw/$name.part"; tail -c 65536 "$raw/$name.err"; echo "$*: exit code $code after $((SECONDS - from)) s"; } >"$raw/$name.failed"
		rm "$raw/$name.part" "$raw/$name.err"
	fi
	printf '%-40s %4d s%s\n' "$name" $((SECONDS - from)) "$([ $code -eq 0 ] || echo "   exit code $code")"
}

ours() { # ROUND OP
	measure "$1.gorun.$2" gorun -np "$np" gorun-bench -json -op "$2" -mode "$modes" -b "$min" -e "$max" -f "$factor" -n 100 -g 20 -G 10 -w 5 -r 1 -buffers 20 -limit 2s
}

theirs() { # ROUND OP CALLS
	[ -n "$tests" ] || return 0
	local flags="-n 100 -w 20"
	[ "$3" != captured ] || flags="-n 20 -w 5 -G 10"
	# shellcheck disable=SC2086
	measure "$1.nccl-tests.$2.$3" "${mpi[@]}" -np "$np" "$tests/$(perf "$2")" -b "$min" -e "$max" -f "$factor" -g 1 -d float -o sum -c 0 $flags
}

torch() { # ROUND
	[ -n "$python" ] || return 0
	measure "$1.pytorch" gorun -np "$np" "$python" "$here/peers_torch.py" -n 100 -g 20 -G 10
}

longest=0
for ((r = 1; r <= rounds; r++)); do
	name=$(printf '%02d' $r)
	from=$SECONDS
	if [ "$seconds" -gt 0 ] && [ $r -gt 1 ] && [ $((SECONDS + longest)) -gt "$seconds" ]; then
		echo "rounds $r to $rounds: the longest round took $longest s, and $((seconds - SECONDS)) s are left of $seconds" >>"$raw/left-out"
		break
	fi
	# Every other round the other way round, so that none always comes after the same.
	if [ $((r % 2)) -eq 1 ]; then
		for op in "${op_list[@]}"; do
			ours "$name" "$op"
			theirs "$name" "$op" eager
			theirs "$name" "$op" captured
		done
		torch "$name"
	else
		torch "$name"
		for op in "${op_list[@]}"; do
			theirs "$name" "$op" captured
			theirs "$name" "$op" eager
			ours "$name" "$op"
		done
	fi
	took=$((SECONDS - from))
	[ $took -le $longest ] || longest=$took
done

summary
