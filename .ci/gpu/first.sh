#!/bin/bash
# first.sh [flags]: measures the time from a launcher's start to the first all-reduce of its ranks. -h shows the flags.
set -u
# shellcheck source=common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" || exit
me=first
flags="np rounds nccl-tests mpirun python seconds out bin"

usage() {
	cat <<'TEXT'
first.sh [flags]

Measures, in rounds, one program after the other, the time from a launcher's start until rank 0 has printed
the result of the ranks' first all-reduce (8 bytes), and until the launcher has ended:

  gorun        gorun with its example allreduce (Go, captured into a graph)
  nccl-tests   mpirun with all_reduce_perf
  gorun-torch  gorun with a Python program of torch.distributed
  torchrun     torchrun with the same

  first.json   each time in seconds; median, least, greatest of each program and number of ranks
  first.txt    the same as a table, also printed

Exit code 0; 1: a program failed; 2: wrong command line.

  --np LIST         numbers of ranks (default 1,2)
  --rounds N        rounds (default 5)
  --nccl-tests DIR  where all_reduce_perf is, built with MPI=1 (default: without nccl-tests)
  --mpirun CMD      starts it (default "mpirun.openmpi --allow-run-as-root")
  --python PATH     a Python with torch (default: without PyTorch)
  --seconds S       begin no program after S seconds (default 0: no limit)
  --out DIR         where the files go (default first-results)
  --bin DIR         where gorun and allreduce are (default: bin beside this script or beside the folder
                    src that it is in, else the PATH)
  --no-multicast    keep NVLink multicast off: NCCL_NVLS_ENABLE=0, NVSHMEM_DISABLE_NVLS=1 and
                    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in every process
TEXT
}

np=1,2
rounds=5
python=
seconds=0
out=first-results
parse "$@"
[[ $np =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || die "--np $np: want numbers such as 1,2,4"
[[ $rounds =~ ^[1-9][0-9]?$ ]] || die "--rounds $rounds: want a number from 1 to 99"
[[ $seconds =~ ^[0-9]+$ ]] || die "--seconds $seconds: want whole seconds"
[ -z "$tests" ] || [ -x "$tests/all_reduce_perf" ] || die "--nccl-tests $tests: no program all_reduce_perf"
need gorun allreduce
surroundings
[ -z "$python" ] || command -v "$python" >/dev/null || die "--python: no program $python"
[ ! -e "$out/first.json" ] || die "--out $out: has results already"
mkdir -p "$out" || die "make $out: no"

times=$out/first.times # PROGRAM RANKS FIRST END, in microseconds, a line a run
: >"$times"
failed=0
one=90 # seconds that a program may take

# measure PROGRAM RANKS RESULT COMMAND...: RESULT is a pattern of the line that the first all-reduce is followed by.
measure() {
	local name=$1 ranks=$2 result=$3 from first= line end code
	shift 3
	[ "$seconds" -eq 0 ] || [ $SECONDS -lt "$seconds" ] || return 0
	from=${EPOCHREALTIME/./}
	{
		while IFS= read -r line; do
			[ -n "$first" ] || ! [[ $line =~ $result ]] || first=${EPOCHREALTIME/./}
		done
		end=${EPOCHREALTIME/./}
	} < <(timeout -k 5 $one "$@" 2>"$out/err" </dev/null)
	wait $!
	code=$?
	if [ $code -ne 0 ] || [ -z "$first" ]; then
		failed=1
		{ echo "$*: exit code $code${first:+, result seen}"; tail -n 20 "$out/err"; } | tee -a "$out/failed"
		return
	fi
	echo "$name $ranks $((first - from)) $((end - from))" >>"$times"
}

for ((r = 1; r <= rounds; r++)); do
	for n in ${np//,/ }; do
		measure gorun "$n" '^1 launches on rank 0' gorun -np "$n" "$(command -v allreduce)" -n 2 -launches 1
		[ -z "$tests" ] || measure nccl-tests "$n" '^ +8 +2 +float' "${mpi[@]}" -np "$n" "$tests/all_reduce_perf" -b 8 -e 8 -g 1 -n 1 -w 0 -c 0
		[ -z "$python" ] || measure gorun-torch "$n" '^first all-reduce' gorun -np "$n" "$python" "$here/first_torch.py"
		[ -z "$python" ] || measure torchrun "$n" '^first all-reduce' "$python" -m torch.distributed.run --standalone --nproc-per-node "$n" "$here/first_torch.py"
	done
done
rm -f "$out/err"

sort -s -k2,2n -k1,1 "$times" | awk -v json="$out/first.json" -v text="$out/first.txt" '
	function median(v, n,   i, j, x) {
		for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j] < v[j-1]; j--) { x = v[j]; v[j] = v[j-1]; v[j-1] = x }
		return n % 2 ? v[(n+1)/2] : (v[n/2] + v[n/2+1]) / 2
	}
	function list(v, n,   i, s) { for (i = 1; i <= n; i++) s = s (i > 1 ? ", " : "") sprintf("%.6f", v[i]); return s }
	function flush(   m, all) {
		if (n == 0) return
		all = sprintf("\"first_s\": [%s], \"end_s\": [%s]", list(first, n), list(end, n))
		m = median(first, n)
		printf "%s\n  {\"program\": \"%s\", \"ranks\": %d, \"median_s\": %.6f, \"least_s\": %.6f, \"greatest_s\": %.6f, \"median_end_s\": %.6f, %s}", \
			(started++ ? "," : "["), name, ranks, m, first[1], first[n], median(end, n), all >json
		printf "%-12s %5d %8.3f (%.3f-%.3f) %8.3f %6d\n", name, ranks, m, first[1], first[n], median(end, n), n >text
		n = 0
	}
	BEGIN { print "program      ranks    first (least-greatest) s   end s  runs" >text }
	$1 " " $2 != key { flush(); key = $1 " " $2; name = $1; ranks = $2 }
	{ n++; first[n] = $3 / 1e6; end[n] = $4 / 1e6 }
	END { flush(); print (started ? "\n]" : "[]") >json }'
rm "$times"
cat "$out/first.txt"
exit $failed
