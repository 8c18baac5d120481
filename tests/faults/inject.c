/* File-system faults for tests: a library for LD_PRELOAD.
 *
 * It counts the file-system calls that touch paths below one root directory, writes each to a trace
 * file, and injects one fault at the N-th of them. Calls before `faults_arm` and calls elsewhere
 * pass unchanged. A file descriptor is resolved through /proc/self/fd, so that there is no table of
 * open files to keep: dup, close and rename need no care.
 *
 * Limits: glibc on 64-bit Linux. Only calls through the dynamic symbol table are seen: not glibc's
 * own (fopen, fwrite), not raw system calls. The stat family, flock and readdir always succeed.
 *
 * Every wrapper has a name of its own and an assembler label, so that C and C++ compilers accept it
 * whatever exception specifications the headers give to the declarations.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The order is that of MODES in injector.py. */
enum { COUNT, KILL_BEFORE, KILL_AFTER, KILL_TORN, FULL, BROKEN };

/* What a wrapper does with its call. */
enum { PASS, FAIL, AFTER, TORN };

static char root[PATH_MAX];
static size_t root_length;
static long fault_at, calls;
static int mode, armed, trace = -1;

/* Begins to count below `directory`. Returns 0, or -1 with errno. */
int faults_arm(const char *directory, long n, int fault, const char *trace_file) {
    armed = 0;
    if (realpath(directory, root) == NULL) return -1;
    root_length = strlen(root);
    trace = (int)syscall(SYS_openat, AT_FDCWD, trace_file,
                         O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (trace < 0) return -1;
    fault_at = n;
    mode = fault;
    __atomic_store_n(&calls, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* Ends counting; returns the number of calls. */
long faults_disarm(void) {
    __atomic_store_n(&armed, 0, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
}

static void die(void) {
    for (;;) syscall(SYS_kill, (long)getpid(), (long)SIGKILL);
}

/* Where a descriptor points; "" if that is unknown. */
static void path_of(int descriptor, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    char *deleted = strstr(out, " (deleted)");
    if (deleted != NULL) *deleted = 0;
}

/* The absolute path of a name: links are resolved in its directory, not in its last part. */
static void resolve(int directory, const char *name, char *out) {
    char whole[2 * PATH_MAX], base[NAME_MAX + 2] = "", parent[PATH_MAX];
    if (name[0] == '/') {
        snprintf(parent, sizeof parent, "/");
    } else if (directory != AT_FDCWD) {
        path_of(directory, parent);
    } else if (getcwd(parent, sizeof parent) == NULL) {
        parent[0] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", parent, name);
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    char *last = strrchr(whole, '/');
    if (strcmp(last, "/.") != 0 && strcmp(last, "/..") != 0) {
        snprintf(base, sizeof base, "%s", last);
        *last = 0;
    }
    if (realpath(whole[0] ? whole : "/", parent) == NULL) {
        snprintf(parent, sizeof parent, "%.*s", PATH_MAX - 1, whole);
    }
    snprintf(out, PATH_MAX, "%.*s%s", PATH_MAX / 2, strcmp(parent, "/") ? parent : "", base);
}

static int is_below(const char *path) {
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || !path[root_length]);
}

/* Counts a call and decides. `allocates`: it may need room on the disk. */
static int decide(const char *call, const char *path, int allocates) {
    if (!is_below(path)) return PASS;
    long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    int due = mode == FULL ? fault_at > 0 && n >= fault_at && allocates : n == fault_at;
    due = due && mode != COUNT;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%d\t%d\t%s\t%s\n", due, allocates, call, path);
    syscall(SYS_write, (long)trace, line, (long)length);
    if (!due) return PASS;
    switch (mode) {
        case KILL_BEFORE: die(); break;
        case KILL_AFTER: return AFTER;
        case KILL_TORN: return TORN;
        case FULL: errno = ENOSPC; return FAIL;
        case BROKEN: errno = EIO; return FAIL;
    }
    return PASS;
}

static int is_armed(void) { return __atomic_load_n(&armed, __ATOMIC_SEQ_CST); }

static int exists(const char *path) { return faccessat(AT_FDCWD, path, F_OK, 0) == 0; }

static int on_name(const char *call, int directory, const char *name, int allocates, int makes) {
    if (!is_armed() || name == NULL) return PASS;
    char path[PATH_MAX];
    int before = errno;
    resolve(directory, name, path);
    int decided = decide(call, path, allocates || (makes && !exists(path)));
    if (decided != FAIL) errno = before;
    return decided;
}

static int on_names(const char *call, int from_directory, const char *from, int to_directory,
                    const char *to) {
    if (!is_armed() || from == NULL || to == NULL) return PASS;
    char source[PATH_MAX], target[PATH_MAX];
    int before = errno;
    resolve(from_directory, from, source);
    resolve(to_directory, to, target);
    int decided = decide(call, is_below(target) ? target : source, 1);
    if (decided != FAIL) errno = before;
    return decided;
}

static int on_file(const char *call, int descriptor, int allocates) {
    if (!is_armed()) return PASS;
    char path[PATH_MAX];
    int before = errno;
    path_of(descriptor, path);
    int decided = decide(call, path, allocates);
    if (decided != FAIL) errno = before;
    return decided;
}

/* The next definition of a symbol: glibc's. */
#define NEXT(type, name, ...)                                   \
    typedef type (*function_type)(__VA_ARGS__);                 \
    static function_type next;                                  \
    if (next == NULL) next = (function_type)dlsym(RTLD_NEXT, name)

/* A torn call that is no write is killed before it. */
#define RUN(type, failure, decision, expression) \
    int decided = (decision);                    \
    if (decided == FAIL) return failure;         \
    if (decided == TORN) die();                  \
    type result = (expression);                  \
    if (decided == AFTER) die();                 \
    return result

#define WRAPPER(type, name, ...)                            \
    type injected_##name(__VA_ARGS__) __asm__(#name);       \
    type injected_##name(__VA_ARGS__)

/* --------------------------------------------------------------------------------- opening */

#define PERMISSIONS(flags)                                      \
    unsigned permissions = 0;                                   \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {     \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        permissions = va_arg(rest, unsigned);                   \
        va_end(rest);                                           \
    }

#define OPEN(name)                                                                      \
    WRAPPER(int, name, const char *path, int flags, ...) {                              \
        NEXT(int, #name, const char *, int, ...);                                       \
        PERMISSIONS(flags)                                                              \
        RUN(int, -1, on_name("open", AT_FDCWD, path, 0, (flags & O_CREAT) != 0),        \
            next(path, flags, permissions));                                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                    \
    WRAPPER(int, name, int directory, const char *path, int flags, ...) {               \
        NEXT(int, #name, int, const char *, int, ...);                                  \
        PERMISSIONS(flags)                                                              \
        RUN(int, -1, on_name("open", directory, path, 0, (flags & O_CREAT) != 0),       \
            next(directory, path, flags, permissions));                                 \
    }
OPENAT(openat)
OPENAT(openat64)

#define OPEN_CHECKED(name)                                                              \
    WRAPPER(int, name, const char *path, int flags) {                                   \
        NEXT(int, #name, const char *, int);                                            \
        RUN(int, -1, on_name("open", AT_FDCWD, path, 0, 0), next(path, flags));         \
    }
OPEN_CHECKED(__open_2)
OPEN_CHECKED(__open64_2)

#define CREAT(name)                                                                     \
    WRAPPER(int, name, const char *path, mode_t permissions) {                          \
        NEXT(int, #name, const char *, mode_t);                                         \
        RUN(int, -1, on_name("open", AT_FDCWD, path, 0, 1), next(path, permissions));   \
    }
CREAT(creat)
CREAT(creat64)

WRAPPER(DIR *, opendir, const char *path) {
    NEXT(DIR *, "opendir", const char *);
    RUN(DIR *, NULL, on_name("opendir", AT_FDCWD, path, 0, 0), next(path));
}

/* --------------------------------------------------------------------------------- reading */

WRAPPER(ssize_t, read, int descriptor, void *data, size_t size) {
    NEXT(ssize_t, "read", int, void *, size_t);
    RUN(ssize_t, -1, on_file("read", descriptor, 0), next(descriptor, data, size));
}

WRAPPER(ssize_t, __read_chk, int descriptor, void *data, size_t size, size_t room) {
    NEXT(ssize_t, "__read_chk", int, void *, size_t, size_t);
    RUN(ssize_t, -1, on_file("read", descriptor, 0), next(descriptor, data, size, room));
}

WRAPPER(ssize_t, readv, int descriptor, const struct iovec *parts, int count) {
    NEXT(ssize_t, "readv", int, const struct iovec *, int);
    RUN(ssize_t, -1, on_file("read", descriptor, 0), next(descriptor, parts, count));
}

#define PREAD(name)                                                                             \
    WRAPPER(ssize_t, name, int descriptor, void *data, size_t size, long offset) {              \
        NEXT(ssize_t, #name, int, void *, size_t, long);                                        \
        RUN(ssize_t, -1, on_file("read", descriptor, 0), next(descriptor, data, size, offset)); \
    }
PREAD(pread)
PREAD(pread64)

#define MMAP(name)                                                                              \
    WRAPPER(void *, name, void *start, size_t size, int rights, int flags, int descriptor,      \
            long offset) {                                                                      \
        NEXT(void *, #name, void *, size_t, int, int, int, long);                               \
        RUN(void *, MAP_FAILED, descriptor < 0 ? PASS : on_file("mmap", descriptor, 0),         \
            next(start, size, rights, flags, descriptor, offset));                              \
    }
MMAP(mmap)
MMAP(mmap64)

/* --------------------------------------------------------------------------------- writing */

#define WRITE(decision, half, expression)   \
    int torn = (decision);                  \
    if (torn == TORN) {                     \
        half;                               \
        die();                              \
    }                                       \
    RUN(ssize_t, -1, torn, expression)

WRAPPER(ssize_t, write, int descriptor, const void *data, size_t size) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    WRITE(on_file("write", descriptor, 1), next(descriptor, data, size / 2),
          next(descriptor, data, size));
}

WRAPPER(ssize_t, writev, int descriptor, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    WRITE(on_file("write", descriptor, 1), next(descriptor, parts, count / 2),
          next(descriptor, parts, count));
}

#define PWRITE(name)                                                                            \
    WRAPPER(ssize_t, name, int descriptor, const void *data, size_t size, long offset) {        \
        NEXT(ssize_t, #name, int, const void *, size_t, long);                                  \
        WRITE(on_file("write", descriptor, 1), next(descriptor, data, size / 2, offset),        \
              next(descriptor, data, size, offset));                                            \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define SYNC(name)                                                                      \
    WRAPPER(int, name, int descriptor) {                                                \
        NEXT(int, #name, int);                                                          \
        RUN(int, -1, on_file("fsync", descriptor, 1), next(descriptor));                \
    }
SYNC(fsync)
SYNC(fdatasync)

#define FTRUNCATE(name)                                                                 \
    WRAPPER(int, name, int descriptor, long length) {                                   \
        NEXT(int, #name, int, long);                                                    \
        RUN(int, -1, on_file("truncate", descriptor, 1), next(descriptor, length));     \
    }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

#define TRUNCATE(name)                                                                          \
    WRAPPER(int, name, const char *path, long length) {                                         \
        NEXT(int, #name, const char *, long);                                                   \
        RUN(int, -1, on_name("truncate", AT_FDCWD, path, 1, 0), next(path, length));            \
    }
TRUNCATE(truncate)
TRUNCATE(truncate64)

/* --------------------------------------------------------------------------------- names */

WRAPPER(int, mkdir, const char *path, mode_t permissions) {
    NEXT(int, "mkdir", const char *, mode_t);
    RUN(int, -1, on_name("mkdir", AT_FDCWD, path, 0, 1), next(path, permissions));
}

WRAPPER(int, mkdirat, int directory, const char *path, mode_t permissions) {
    NEXT(int, "mkdirat", int, const char *, mode_t);
    RUN(int, -1, on_name("mkdir", directory, path, 0, 1), next(directory, path, permissions));
}

WRAPPER(int, rmdir, const char *path) {
    NEXT(int, "rmdir", const char *);
    RUN(int, -1, on_name("rmdir", AT_FDCWD, path, 0, 0), next(path));
}

WRAPPER(int, unlink, const char *path) {
    NEXT(int, "unlink", const char *);
    RUN(int, -1, on_name("unlink", AT_FDCWD, path, 0, 0), next(path));
}

WRAPPER(int, unlinkat, int directory, const char *path, int flags) {
    NEXT(int, "unlinkat", int, const char *, int);
    RUN(int, -1, on_name("unlink", directory, path, 0, 0), next(directory, path, flags));
}

WRAPPER(int, rename, const char *from, const char *to) {
    NEXT(int, "rename", const char *, const char *);
    RUN(int, -1, on_names("rename", AT_FDCWD, from, AT_FDCWD, to), next(from, to));
}

WRAPPER(int, renameat, int there, const char *from, int here, const char *to) {
    NEXT(int, "renameat", int, const char *, int, const char *);
    RUN(int, -1, on_names("rename", there, from, here, to), next(there, from, here, to));
}

WRAPPER(int, renameat2, int there, const char *from, int here, const char *to, unsigned flags) {
    NEXT(int, "renameat2", int, const char *, int, const char *, unsigned);
    RUN(int, -1, on_names("rename", there, from, here, to), next(there, from, here, to, flags));
}

WRAPPER(int, link, const char *from, const char *to) {
    NEXT(int, "link", const char *, const char *);
    RUN(int, -1, on_names("link", AT_FDCWD, from, AT_FDCWD, to), next(from, to));
}

WRAPPER(int, linkat, int there, const char *from, int here, const char *to, int flags) {
    NEXT(int, "linkat", int, const char *, int, const char *, int);
    RUN(int, -1, on_names("link", there, from, here, to), next(there, from, here, to, flags));
}

WRAPPER(int, symlink, const char *target, const char *path) {
    NEXT(int, "symlink", const char *, const char *);
    RUN(int, -1, on_name("symlink", AT_FDCWD, path, 1, 0), next(target, path));
}

#ifdef __cplusplus
}
#endif
