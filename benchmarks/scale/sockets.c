// Counts what each thread sends through sockets. Preloaded (LD_PRELOAD), it sees what Python, torch and gloo send alike,
// and slows nothing down. `sockets.py` builds it and reads the counts.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

// For the threads in the foreground, then for those in the background: writes to the store and their bytes, writes by
// the store and their bytes, other writes and their bytes. Their order is that of FIELDS in sockets.py.
static int64_t nowhere[12];
static int64_t *counts = nowhere;
static int store_port;
static __thread int is_background;

void sockets_count(int64_t *place, int port) {
    counts = place;
    store_port = port;
}

void sockets_background(void) { is_background = 1; }

static int port_of(int fd, int (*name)(int, struct sockaddr *, socklen_t *)) {
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    if (name(fd, (struct sockaddr *)&address, &size) != 0) return -1;
    if (address.ss_family == AF_INET) return ntohs(((struct sockaddr_in *)&address)->sin_port);
    if (address.ss_family == AF_INET6) return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    return -1;
}

static ssize_t counted(int fd, ssize_t sent) {
    int before = errno, peer;
    if (sent > 0 && counts != nowhere && (peer = port_of(fd, getpeername)) >= 0) {
        int kind = peer == store_port ? 0 : port_of(fd, getsockname) == store_port ? 1 : 2;
        int64_t *place = counts + 6 * is_background + 2 * kind;
        __atomic_fetch_add(place, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(place + 1, sent, __ATOMIC_RELAXED);
    }
    errno = before;
    return sent;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    return counted(fd, real(fd, data, size, flags));
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    REAL(sendto);
    return counted(fd, real(fd, data, size, flags, to, length));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    return counted(fd, real(fd, message, flags));
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return counted(fd, real(fd, data, size));
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    REAL(writev);
    return counted(fd, real(fd, parts, number));
}
