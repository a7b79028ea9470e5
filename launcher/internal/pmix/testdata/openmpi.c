// A program of Open MPI for tests of its launcher. The first argument says what it does; each rank prints a line.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, size;

// sums checks an all-reduce of a vector.
static int sums(void) {
	enum { n = 10000 };
	static int in[n], out[n];
	for (int i = 0; i < n; i++)
		in[i] = rank + i;
	MPI_Allreduce(in, out, n, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < n; i++)
		if (out[i] != size * (size - 1) / 2 + size * i)
			return 0;
	return 1;
}

// ring passes a number round, each rank adds its own.
static int ring(void) {
	int v = 0, next = (rank + 1) % size, last = (rank + size - 1) % size;
	if (size == 1)
		return 1;
	if (rank == 0) {
		MPI_Send(&v, 1, MPI_INT, next, 1, MPI_COMM_WORLD);
		MPI_Recv(&v, 1, MPI_INT, last, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		return v == size * (size - 1) / 2;
	}
	MPI_Recv(&v, 1, MPI_INT, last, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	v += rank;
	MPI_Send(&v, 1, MPI_INT, next, 1, MPI_COMM_WORLD);
	return 1;
}

// attribute is a number that MPI keeps of MPI_COMM_WORLD, -1 if it has none.
static int attribute(int key) {
	int *v, there;
	MPI_Comm_get_attr(MPI_COMM_WORLD, key, &v, &there);
	return there ? *v : -1;
}

int main(int argc, char **argv) {
	const char *what = argc > 1 ? argv[1] : "hello";
	if (!strcmp(what, "silent"))
		return 0;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	MPI_Comm host;
	int here;
	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
	MPI_Comm_size(host, &here);
	MPI_Comm_free(&host);
	int good = sums() && ring();
	printf("rank %d of %d, program %d, %d on its host, universe %d: %s\n", rank, size, attribute(MPI_APPNUM), here,
	       attribute(MPI_UNIVERSE_SIZE), good ? "good" : "WRONG");
	fflush(stdout);
	int last = rank == size - 1;
	if (!strcmp(what, "abort") && last)
		MPI_Abort(MPI_COMM_WORLD, 7);
	if (!strcmp(what, "exit") && last)
		_exit(0);
	if (!strcmp(what, "die") && last)
		abort();
	if (!strcmp(what, "hang") && last)
		pause();
	if (!strcmp(what, "spawn")) {
		MPI_Comm c;
		MPI_Comm_spawn("/bin/true", MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &c, MPI_ERRCODES_IGNORE);
	}
	MPI_Finalize();
	return good ? 0 : 1;
}
