#!/bin/bash
# eager.sh [flags]: why small eager calls take longer by gorun than by nccl-tests, on one machine with GPUs. -h shows the flags.
set -u
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" || exit
me=eager
flags="nccl-tests mpirun rounds causes conditions np seconds out bin test"

usage() {
	cat <<'TEXT'
eager.sh [flags] --nccl-tests DIR

Measures small eager collectives in many short rounds, interleaved, and writes:

  peers.txt, peers.json  gorun-bench beside nccl-tests: all-reduce, broadcast and sendrecv of 8 bytes to 256 KiB,
                         eager, and all-reduce of 64 KiB, captured
  causes.txt             all-reduce again under one other condition at a time, medians of microseconds a call:
                         of all, and until all calls were enqueued (where the two are equal the processor is the
                         bound, else the GPU)
  raw.tar.gz             what each program printed

Conditions: ours (gorun-bench as it is), nopreempt (GODEBUG=asyncpreemptoff=1), nogc (GOGC=off), procs1 and procs2
(GOMAXPROCS), library (GORUN_PEER=off: all calls by the library), trust (ranks do not look at each other's calls), plain (memory that is not nccl.Alloc's),
bound (gorun --bind-to core), go (nccl.test: the library's function alone, from Go, beside package nccl),
c and c-nccl (the same loop in C, with the driver's and with the library's memory), tests (nccl-tests as mpirun
starts it), tests-free (mpirun --bind-to none), queue1 and tests-queue1 (CUDA_DEVICE_MAX_CONNECTIONS=1).

  --nccl-tests DIR  where all_reduce_perf, broadcast_perf and sendrecv_perf are, built with MPI=1; "": without
  --mpirun CMD      starts them (default "mpirun.openmpi --allow-run-as-root")
  --rounds N        rounds beside nccl-tests (default 15)
  --causes N        rounds of the conditions, one after every second of the others (default 7)
  --conditions LIST some of them (default: all)
  --np N            ranks (default 2)
  --seconds S       begin no round that would take longer than to S seconds from the start (default 450)
  --out DIR         where the files go (default eager-results)
  --bin DIR         where gorun, gorun-bench and eager (eager.c, else built by cc) are (default: bin beside this
                    script or beside the folder src that it is in, else the PATH)
  --test FILE       nccl.test (default: src/nccl/nccl.test beside bin)
  --no-multicast    keep NVLink multicast off: NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1 and
                    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in every process
TEXT
}

np=2 rounds=15 causes=7 seconds=450 out=eager-results tests=unset test=''
known="ours library nopreempt nogc procs1 procs2 trust plain bound go c c-nccl tests tests-free queue1 tests-queue1"
conditions=${known// /,}
parse "$@"
for n in "$np" "$rounds" "$seconds"; do
	[[ $n =~ ^[1-9][0-9]*$ ]] || die "$n: want a number"
done
[[ $causes =~ ^[0-9]+$ ]] || die "--causes $causes: want a number"
[ "$tests" != unset ] || die "--nccl-tests DIR is missing; -h shows the flags"
for prog in all_reduce_perf broadcast_perf sendrecv_perf; do
	[ -z "$tests" ] || [ -x "$tests/$prog" ] || die "--nccl-tests $tests: no program $prog"
done
IFS=, read -ra condition_list <<<"$conditions"
for c in "${condition_list[@]}"; do
	[[ " $known " == *" $c "* ]] || die "--conditions: no $c; there are $known"
done
need gorun gorun-bench
surroundings
[ -n "$test" ] || test=${bin:-.}/../src/nccl/nccl.test
raw=$out/raw
[ ! -e "$raw" ] && [ ! -e "$out/peers.json" ] || die "--out $out: has results already"
mkdir -p "$raw" "$out/causes" || die "make $raw: no"
eager=$(command -v eager) || {
	eager=$out/eager
	cc -O2 -o "$eager" "$here/eager.c" -ldl 2>"$out/causes/cc.err" || eager=
}

# measure FILE COMMAND...: its stdout is FILE.txt, or with its stderr FILE.failed.
measure() {
	local file=$1 code
	shift
	timeout -k 5 60 "$@" >"$file.part" 2>"$file.err" </dev/null
	code=$?
	if [ $code -eq 0 ]; then
		mv "$file.part" "$file.txt" && rm "$file.err"
	else
		{ tail -n 20 "$file.part"; tail -n 20 "$file.err"; echo "$*: exit code $code"; } >"$file.failed"
		rm "$file.part" "$file.err"
		printf '%s: exit code %d\n' "${file##*/}" $code
	fi
}

calls=500
sizes=(8 64 512 4096 32768 262144)
ours() { # FILE OP [gorun's and gorun-bench's other flags, apart by --]
	local file=$1 op=$2 flags=()
	shift 2
	while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
	[ $# -eq 0 ] || shift
	measure "$file" gorun -np "$np" "${flags[@]}" gorun-bench -json -op "$op" -mode auto -calls eager -b 8 -e 256K -f 8 -n $calls -w 20 -r 1 -limit 2s "$@"
}
theirs() { # FILE PROGRAM [mpirun's other flags]
	local file=$1 prog=$2
	shift 2
	[ -n "$tests" ] || return 0
	measure "$file" "${mpi[@]}" -np "$np" "$@" "$tests/$prog" -b 8 -e 256K -f 8 -g 1 -d float -o sum -c 0 -n $calls -w 20
}

beside() { # ROUND
	local op prog
	for op in all-reduce:all_reduce_perf broadcast:broadcast_perf sendrecv:sendrecv_perf; do
		prog=${op#*:} op=${op%:*}
		if [ $((10#$1 % 2)) -eq 1 ]; then
			ours "$raw/$1.gorun.$op" "$op"
			theirs "$raw/$1.nccl-tests.$op.eager" "$prog"
		else
			theirs "$raw/$1.nccl-tests.$op.eager" "$prog"
			ours "$raw/$1.gorun.$op" "$op"
		fi
	done
	if [ $((10#$1 % 3)) -eq 1 ]; then
		measure "$raw/$1.gorun.captured" gorun -np "$np" gorun-bench -json -op all-reduce -mode auto -calls captured -b 64K -e 64K -g 20 -G 20 -w 5 -r 5 -limit 2s
		[ -z "$tests" ] || measure "$raw/$1.nccl-tests.all-reduce.captured" "${mpi[@]}" -np "$np" "$tests/all_reduce_perf" -b 64K -e 64K -g 1 -d float -o sum -c 0 -n 20 -w 5 -G 20
	fi
}

condition() { # ROUND NAME
	local file=$out/causes/$1.$2
	case $2 in
	ours) ours "$file" all-reduce ;;
	library) GORUN_PEER=off ours "$file" all-reduce ;;
	nopreempt) GODEBUG=asyncpreemptoff=1 ours "$file" all-reduce ;;
	nogc) GOGC=off ours "$file" all-reduce ;;
	procs1) GOMAXPROCS=1 ours "$file" all-reduce ;;
	procs2) GOMAXPROCS=2 ours "$file" all-reduce ;;
	trust) ours "$file" all-reduce -- -compare trust ;;
	plain) ours "$file" all-reduce -- -mode plain ;;
	bound) ours "$file" all-reduce --bind-to core ;;
	go) [ ! -x "$test" ] || measure "$file" gorun -np "$np" "$test" -test.run '^$' -test.bench 'LibraryAllReduce/(8|4096)' -test.benchtime 5000x ;;
	c) [ -z "$eager" ] || measure "$file" "$eager" -np "$np" -n $calls -w 20 -r 1 "${sizes[@]}" ;;
	c-nccl) [ -z "$eager" ] || measure "$file" "$eager" -np "$np" -n $calls -w 20 -r 1 -memory nccl "${sizes[@]}" ;;
	tests) theirs "$file" all_reduce_perf ;;
	tests-free) theirs "$file" all_reduce_perf --bind-to none ;;
	queue1) CUDA_DEVICE_MAX_CONNECTIONS=1 ours "$file" all-reduce ;;
	tests-queue1) CUDA_DEVICE_MAX_CONNECTIONS=1 theirs "$file" all_reduce_perf -x CUDA_DEVICE_MAX_CONNECTIONS ;;
	esac
}

# values prints CONDITION BYTES US ENQUEUED of all files of the conditions.
values() {
	local f name
	for f in "$out"/causes/*.txt; do
		[ -e "$f" ] || continue
		name=${f##*/} name=${name#*.} name=${name%.txt}
		case $name in
		go) awk '/^Benchmark.*ns\/op/ && !seen[$1]++ { split($1, p, "/"); sub(/-[0-9]+$/, "", p[3]); for (i = 2; i <= NF; i++) if ($i == "ns/op") print "go-" p[3], p[2], $(i-1) / 1000, "-" }' "$f" ;;
		tests*) awk -v name="$name" '/^ *[0-9]+ +[0-9]+ +float/ { print name, $1, $6, "-" }' "$f" ;;
		*) awk -v name="$name" 'function field(k) { if (!match($0, "\"" k "\":[0-9.e+-]+")) return "-"; return substr($0, RSTART + length(k) + 3, RLENGTH - length(k) - 3) }
			/"us":/ { print name, field("bytes"), field("us"), field("enqueue_us") }' "$f" ;;
		esac
	done
}

# table makes medians of values.
table() {
	echo "# all-reduce, eager, $np ranks: microseconds a call, median (least-greatest) of the rounds; enqueued: until all calls were, median"
	printf '%-14s %8s %7s  %-24s %9s\n' condition bytes rounds time enqueued
	values | sort -k1,1 -k2,2n -k3,3n | awk '
		function out() {
			if (!n) return
			m = sprintf("%.2f (%.2f-%.2f)", (us[int((n+1)/2)] + us[int(n/2)+1]) / 2, us[1], us[n])
			e = "-"
			if (k) { for (i = 1; i <= k; i++) for (j = i + 1; j <= k; j++) if (en[j] < en[i]) { t = en[i]; en[i] = en[j]; en[j] = t }
				e = sprintf("%.2f", (en[int((k+1)/2)] + en[int(k/2)+1]) / 2) }
			printf "%-14s %8d %7d  %-24s %9s\n", name, bytes, n, m, e
		}
		$1 != name || $2 != bytes { out(); name = $1; bytes = $2; n = k = 0 }
		{ us[++n] = $3; if ($4 != "-") en[++k] = $4 }
		END { out() }'
}

# finish writes the files; its exit code is the script's.
finish() {
	local code
	trap '' INT TERM HUP
	rm -f "$raw"/*.part "$raw"/*.err "$out"/causes/*.part "$out"/causes/*.err
	table >"$out/causes.txt"
	gorun-bench compare -json "$out/peers.json" "$raw" >"$out/peers.txt"
	code=$?
	cat "$out/causes/"*.failed >"$out/causes.failed" 2>/dev/null || rm -f "$out/causes.failed"
	tar czf "$out/raw.tar.gz" -C "$out" raw causes && rm -r "$raw" "$out/causes"
	cat "$out/causes.txt" "$out/peers.txt"
	return $code
}
trap 'finish; exit 130' INT
trap 'finish; exit 143' TERM HUP

longest=0 done=0
for ((r = 1; r <= rounds; r++)); do
	from=$SECONDS
	[ $r -eq 1 ] || [ $((SECONDS + longest)) -le "$seconds" ] || break
	name=$(printf '%02d' $r)
	beside "$name"
	if [ $((r % 2)) -eq 1 ] && [ $done -lt "$causes" ]; then
		done=$((done + 1))
		for ((i = 0; i < ${#condition_list[@]}; i++)); do # each round begins with another one
			condition "$name" "${condition_list[(i + r * 4) % ${#condition_list[@]}]}"
		done
	fi
	took=$((SECONDS - from))
	[ $took -le $longest ] || longest=$took
	printf 'round %d: %d s of %d\n' $r $SECONDS "$seconds"
done
finish
