# What eager.sh, first.sh and peers.sh have in common; they source it. Each sets me, its name, flags, the names of those of its flags that
# take a value, and usage.
LC_ALL=C
export LC_ALL

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mpirun="mpirun.openmpi --allow-run-as-root"
tests=''
bin=''
multicast=''

die() {
	printf '%s: %s\n' "$me" "$1" >&2
	exit 2
}

# parse ARGUMENTS...: the value of --NAME goes to the variable NAME, that of --nccl-tests to tests.
parse() {
	local name
	while [ $# -gt 0 ]; do
		name=${1#--}
		case $1 in
		-h | --help) usage; exit 0 ;;
		--no-multicast) multicast=off ;;
		--?*)
			[[ " $flags " == *" $name "* ]] || die "unknown argument $1; -h shows the flags"
			[ $# -ge 2 ] || die "$1 needs a value; -h shows the flags"
			[ "$name" != nccl-tests ] || name=tests
			printf -v "$name" %s "$2"
			shift
			;;
		*) die "unknown argument $1; -h shows the flags" ;;
		esac
		shift
	done
}

# need PROGRAM...: gorun's, from now on on the PATH; else die.
need() {
	local dir prog
	if [ -z "$bin" ]; then
		for dir in "$here/bin" "$here/../../../bin"; do
			[ ! -x "$dir/gorun" ] || { bin=$dir; break; }
		done
	fi
	[ -z "$bin" ] || PATH=$(cd "$bin" && pwd):$PATH
	for prog in "$@"; do
		command -v "$prog" >/dev/null || die "no program $prog: --bin DIR says where it is; tar xf bundle.tar.xz unpacks it beside this script"
	done
}

# surroundings makes mpi the words of mpirun, which must be there where nccl-tests are, and sets the library's variables for all programs.
surroundings() {
	read -ra mpi <<<"$mpirun"
	[ -z "$tests" ] || command -v "${mpi[0]}" >/dev/null || die "--mpirun: no program ${mpi[0]}"
	unset NCCL_DEBUG NCCL_DEBUG_SUBSYS # their lines would be amid the results
	[ -n "$multicast" ] || return 0
	export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
	# Open MPI hands on only what it is told to; others hand on all.
	# It calls itself Open MPI, OpenRTE or prterun, by release and by the name it is called by.
	if [ -n "$tests" ] && [[ $("${mpi[0]}" --version 2>/dev/null) =~ Open\ MPI|OpenRTE|prte ]]; then
		mpi+=(-x NCCL_NVLS_ENABLE -x NVSHMEM_DISABLE_NVLS -x TORCH_SYMM_MEM_DISABLE_MULTICAST)
	fi
}
