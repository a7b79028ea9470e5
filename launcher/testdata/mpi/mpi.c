/* A program with MPI for tests: what it does is its first argument. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, size;

static int is(int argc, char **argv, const char *word) { return argc > 1 && strcmp(argv[1], word) == 0; }

/* at reports whether this is the rank of the second argument. */
static int at(int argc, char **argv) { return argc > 2 && atoi(argv[2]) == rank; }

/* ring sends a number around, which each rank adds itself to. */
static int ring(void) {
	int token = 0, next = (rank + 1) % size, before = (rank + size - 1) % size;
	if (size == 1)
		return 0;
	if (rank == 0)
		MPI_Send(&token, 1, MPI_INT, next, 5, MPI_COMM_WORLD);
	MPI_Recv(&token, 1, MPI_INT, before, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	token += rank;
	if (rank != 0)
		MPI_Send(&token, 1, MPI_INT, next, 5, MPI_COMM_WORLD);
	return rank == 0 ? token - size * (size - 1) / 2 : 0;
}

int main(int argc, char **argv) {
	int sum, *appnum, found, *universe, n, bad = 0;
	char host[MPI_MAX_PROCESSOR_NAME];
	double *big;

	if (is(argc, argv, "late")) { /* until a file is there */
		char *r = getenv("GORUN_RANK");
		if (r && strcmp(r, argv[2]) == 0)
			while (access(argv[3], F_OK) != 0)
				usleep(1000);
	}
	if (is(argc, argv, "never"))
		return 0;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	if (is(argc, argv, "exit") && at(argc, argv))
		exit(atoi(argv[3]));
	if (is(argc, argv, "exit-all"))
		exit(0);
	if (is(argc, argv, "kill") && at(argc, argv))
		raise(SIGKILL);
	if (is(argc, argv, "abort") && at(argc, argv))
		MPI_Abort(MPI_COMM_WORLD, atoi(argv[3]));
	if (is(argc, argv, "fork") && fork() == 0) { /* its child keeps what it has inherited */
		pause();
		exit(0);
	}
	if (is(argc, argv, "spawn")) {
		MPI_Comm more;
		int code, class, len;
		char text[MPI_MAX_ERROR_STRING];
		MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
		code = MPI_Comm_spawn("/bin/true", MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_SELF, &more, MPI_ERRCODES_IGNORE);
		MPI_Error_class(code, &class);
		MPI_Error_string(code, text, &len);
		printf("spawn: error %d\n", class != MPI_SUCCESS);
	}
	if (is(argc, argv, "publish")) {
		int code;
		MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
		MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
		code = MPI_Publish_name("name", MPI_INFO_NULL, "port");
		printf("publish: error %d\n", code != MPI_SUCCESS);
	}
	if (!is(argc, argv, "short"))
		bad |= ring();
	MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	/* More than fits into one message of any transport. */
	n = is(argc, argv, "short") ? 1 : 1 << 16;
	big = malloc(n * sizeof *big);
	for (int i = 0; i < n; i++)
		big[i] = rank + i;
	MPI_Allreduce(MPI_IN_PLACE, big, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < n; i++)
		bad |= big[i] != (double)size * i + sum;
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Get_processor_name(host, &n);
	MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &appnum, &found);
	if (!found)
		appnum = &(int){-1};
	MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_UNIVERSE_SIZE, &universe, &found);
	if (!found)
		universe = &(int){-1};
	MPI_Comm near;
	int close_by;
	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &near);
	MPI_Comm_size(near, &close_by);
	MPI_Comm_free(&near);
	printf("%d/%d app %d sum %d %s host %s near %d universe %d\n", rank, size, *appnum, sum, bad ? "WRONG" : "right", host, close_by, *universe);
	fflush(stdout);
	if (is(argc, argv, "quit")) /* UCX 1.13 over TCP: a rank in MPI_Finalize waits for others that have gone on to the barrier there, and serve it no more */
		exit(0);
	MPI_Finalize();
	if (is(argc, argv, "after") && at(argc, argv))
		exit(atoi(argv[3]));
	return 0;
}
