// NCCL between processes of one machine. The unique id is the path of a file that all ranks map; it
// holds a ring of bytes for each pair of ranks. A group becomes messages, which every rank moves as
// far as it can until all are through: no order of calls that NCCL accepts waits for itself here.
// Sums are made in the order of the ranks. What NCCL would silently get wrong is an error: host
// pointers, ranges outside an allocation, and ranks whose calls differ.
#include "engine.h"
#include "include/nccl.h"

#include <atomic>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

namespace emu {
constexpr size_t RING_BYTES = 1 << 16;
constexpr int MAX_RANKS = 16;

struct Ring {  // written by one rank, read by one other
    std::atomic<uint64_t> written, read;
    char bytes[RING_BYTES];
};
struct SharedComm {
    std::atomic<int> joined;
    Ring rings[];  // (num_ranks, num_ranks): from, to
};

// The call that a message belongs to; sent before the message, and compared by its receiver.
struct Header {
    uint64_t call, count;
    int type, root, what;
    bool operator==(const Header &o) const {
        return call == o.call && count == o.count && type == o.type && root == o.root &&
               what == o.what;
    }
};

struct Message {  // header and data, between this rank and `peer`
    bool outgoing;
    int peer;
    Header header;
    std::vector<char> bytes;
    size_t done = 0;
};

enum What { REDUCE, ALL_REDUCE, BROADCAST, SEND, RECV };
static const char *const names[] = {"ncclReduce", "ncclAllReduce", "ncclBroadcast", "ncclSend",
                                    "ncclSend"};  // a receive is compared with its send

struct Call {
    What what;
    const void *send;
    void *receive;
    size_t count;
    ncclDataType_t type;
    int root;  // or peer
    ncclComm_t comm;
    cudaStream_t stream;
};
}  // namespace emu
using namespace emu;

struct ncclComm {
    int rank, num_ranks;
    SharedComm *shared;
    size_t bytes;
    // point-to-point calls are counted by pair, collective ones in all
    uint64_t collective_calls = 0, sends[MAX_RANKS] = {}, receives[MAX_RANKS] = {};
    Ring &ring(int from, int to) { return shared->rings[from * num_ranks + to]; }
};

static std::vector<Call> group;  // one host thread makes all calls
static int group_depth;

static size_t size_of(ncclDataType_t type) {
    return type == ncclUint8 ? 1 : type == ncclFloat32 ? 4 : 8;
}

// ---- Messages -----------------------------------------------------------------------------------

// Moves what fits; true when it moved something.
static bool move(ncclComm_t comm, Message &m) {
    Ring &ring = m.outgoing ? comm->ring(comm->rank, m.peer) : comm->ring(m.peer, comm->rank);
    const uint64_t written = ring.written.load(std::memory_order_acquire),
                   read = ring.read.load(std::memory_order_acquire);
    const size_t room = m.outgoing ? RING_BYTES - (written - read) : written - read;
    const size_t at = (m.outgoing ? written : read) % RING_BYTES;
    const size_t n = std::min({room, m.bytes.size() - m.done, RING_BYTES - at});
    if (n == 0) return false;
    char *own = m.bytes.data() + m.done;
    memcpy(m.outgoing ? ring.bytes + at : own, m.outgoing ? own : ring.bytes + at, n);
    m.done += n;
    if (m.outgoing)
        ring.written.store(written + n, std::memory_order_release);
    else
        ring.read.store(read + n, std::memory_order_release);
    return true;
}

static void check_header(ncclComm_t comm, const Message &m) {
    Header found;
    memcpy(&found, m.bytes.data(), sizeof found);
    if (found == m.header) return;
    fail(
        "nccl: rank %d expects %s number %llu of %llu elements of type %d, root %d; rank %d sends "
        "%s number %llu of %llu of type %d, root %d",
        comm->rank, names[m.header.what], (unsigned long long)m.header.call,
        (unsigned long long)m.header.count, m.header.type, m.header.root, m.peer, names[found.what],
        (unsigned long long)found.call, (unsigned long long)found.count, found.type, found.root);
}

// A pair's messages go one after another, those of different pairs side by side. A peer that is
// gone is waited for, as by NCCL: noticing that is for others.
static void move_all(ncclComm_t comm, std::vector<Message> &messages) {
    for (size_t left = messages.size(); left > 0;) {
        bool moved = false, busy[2][MAX_RANKS] = {};
        for (Message &m : messages) {
            if (m.done == m.bytes.size() || busy[m.outgoing][m.peer]) continue;
            busy[m.outgoing][m.peer] = true;
            const size_t before = m.done;
            moved |= move(comm, m);
            if (!m.outgoing && before < sizeof(Header) && m.done >= sizeof(Header))
                check_header(comm, m);
            left -= m.done == m.bytes.size();
        }
        const timespec a_moment = {0, 50000};
        if (moved) continue;
        nanosleep(&a_moment, nullptr);
        park_if_leaving();
    }
}

// ---- Calls as messages --------------------------------------------------------------------------

struct Pending {  // a call under way and where its messages are
    Call call;
    Header header;
    std::vector<size_t> from;  // (num_ranks) index of the message from each rank, or NONE
};
constexpr size_t NONE = ~(size_t)0;

static void post(std::vector<Message> &messages, Pending &p, bool outgoing, int peer) {
    const size_t bytes = p.call.count * size_of(p.call.type);
    Message m{outgoing, peer, p.header, {}, 0};
    m.bytes.resize(sizeof(Header) + bytes);
    if (outgoing) {
        memcpy(m.bytes.data(), &p.header, sizeof p.header);
        memcpy(m.bytes.data() + sizeof p.header, p.call.send, bytes);
    } else {
        p.from[(size_t)peer] = messages.size();
    }
    messages.push_back(std::move(m));
}

static void post_call(std::vector<Message> &messages, Pending &p) {
    const Call &c = p.call;
    ncclComm_t comm = c.comm;
    if (c.what == SEND || c.what == RECV) {
        post(messages, p, c.what == SEND, c.root);
        return;
    }
    for (int r = 0; r < comm->num_ranks; r++) {
        if (r == comm->rank) continue;
        const bool to_r = c.what == ALL_REDUCE || (c.what == REDUCE && c.root == r) ||
                          (c.what == BROADCAST && c.root == comm->rank);
        const bool from_r = c.what == ALL_REDUCE || (c.what == REDUCE && c.root == comm->rank) ||
                            (c.what == BROADCAST && c.root == r);
        if (to_r) post(messages, p, true, r);
        if (from_r) post(messages, p, false, r);
    }
}

template <class T>
static void sum_in_order(std::vector<Message> &messages, const Pending &p) {
    const Call &c = p.call;
    std::vector<T> sum(c.count);
    for (int r = 0; r < c.comm->num_ranks; r++) {
        const char *part = r == c.comm->rank
                               ? (const char *)c.send
                               : messages[p.from[(size_t)r]].bytes.data() + sizeof(Header);
        for (size_t i = 0; i < c.count; i++) {
            T x;
            memcpy(&x, part + i * sizeof(T), sizeof x);
            sum[i] = r == 0 ? x : sum[i] + x;
        }
    }
    memcpy(c.receive, sum.data(), c.count * sizeof(T));
}

static void finish_call(std::vector<Message> &messages, const Pending &p) {
    const Call &c = p.call;
    const int rank = c.comm->rank;
    const size_t bytes = c.count * size_of(c.type);
    if (c.what == ALL_REDUCE || (c.what == REDUCE && c.root == rank)) {
        if (c.type == ncclFloat32)
            sum_in_order<float>(messages, p);
        else
            sum_in_order<double>(messages, p);
    } else if (c.what == RECV || (c.what == BROADCAST && c.root != rank)) {
        memcpy(c.receive, messages[p.from[(size_t)c.root]].bytes.data() + sizeof(Header), bytes);
    } else if (c.what == BROADCAST && c.receive != c.send) {
        memcpy(c.receive, c.send, bytes);
    }
}

static Header header_of(const Call &c) {
    ncclComm_t comm = c.comm;
    if (c.what == SEND) return {comm->sends[c.root]++, c.count, c.type, c.root, SEND};
    if (c.what == RECV) return {comm->receives[c.root]++, c.count, c.type, comm->rank, SEND};
    return {comm->collective_calls++, c.count, c.type, c.root, c.what};
}

static void run_group(const std::vector<Call> &calls) {
    std::vector<Message> messages;
    std::vector<Pending> pending;
    for (const Call &c : calls) {
        Pending p{c, header_of(c), std::vector<size_t>((size_t)c.comm->num_ranks, NONE)};
        post_call(messages, p);
        pending.push_back(std::move(p));
    }
    move_all(calls[0].comm, messages);
    for (const Pending &p : pending) finish_call(messages, p);
}

// ---- The API ------------------------------------------------------------------------------------

static void check_range(const char *name, const void *p, size_t bytes) {
    if (!is_device_ptr(p) || !is_device_ptr((const char *)p + bytes))
        fail("%s: %zu bytes at %p are not device memory", name, bytes, p);
}

static ncclResult_t end_group() {
    if (group_depth == 0) return ncclInvalidUsage;
    if (--group_depth > 0 || group.empty()) return ncclSuccess;
    std::vector<Call> calls = std::move(group);
    group.clear();
    for (const Call &c : calls)
        if (c.comm != calls[0].comm || c.stream != calls[0].stream)
            fail("nccl: a group over several communicators or streams is not emulated");
    enqueue(
        calls[0].stream, [calls] { run_group(calls); }, names[calls[0].what]);
    return ncclSuccess;
}

static ncclResult_t add_call(const Call &c) {
    const bool p2p = c.what == SEND || c.what == RECV;
    const bool reads = c.what != RECV && (c.what != BROADCAST || c.root == c.comm->rank);
    const bool writes = c.what != SEND && (c.what != REDUCE || c.root == c.comm->rank);
    if (c.root < 0 || c.root >= c.comm->num_ranks) return ncclInvalidArgument;
    if (!p2p && c.what != BROADCAST && c.type == ncclUint8)
        fail("%s of bytes is not emulated", names[c.what]);
    if (reads) check_range(names[c.what], c.send, c.count * size_of(c.type));
    if (writes) check_range(names[c.what], c.receive, c.count * size_of(c.type));
    group_depth++;
    group.push_back(c);
    return end_group();
}

ncclResult_t ncclGroupStart() {
    EMU_CALL(ncclResult_t, __func__);
    group_depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    EMU_CALL(ncclResult_t, __func__);
    return end_group();
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t, int root, ncclComm_t comm, cudaStream_t stream) {
    EMU_CALL(ncclResult_t, __func__);
    return add_call({REDUCE, send, receive, count, type, root, comm, stream});
}
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    EMU_CALL(ncclResult_t, __func__);
    return add_call({ALL_REDUCE, send, receive, count, type, 0, comm, stream});
}
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    EMU_CALL(ncclResult_t, __func__);
    return add_call({BROADCAST, send, receive, count, type, root, comm, stream});
}
ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    EMU_CALL(ncclResult_t, __func__);
    return add_call({SEND, send, nullptr, count, type, peer, comm, stream});
}
ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    EMU_CALL(ncclResult_t, __func__);
    return add_call({RECV, nullptr, receive, count, type, peer, comm, stream});
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
#define TEXT(name_, value_, text_) \
    case name_:                    \
        return text_;
        EMU_NCCL_RESULTS(TEXT)
    }
    return "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    EMU_CALL(ncclResult_t, __func__);
    *error = ncclSuccess;
    return ncclSuccess;
}

// ---- Communicators ------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    EMU_CALL(ncclResult_t, __func__);
    const char *dir = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%.90s/unpad-emu-nccl-XXXXXX", dir ? dir : "/tmp");
    const int fd = mkstemp(id->internal);
    if (fd < 0) return ncclSystemError;
    close(fd);
    return ncclSuccess;
}

static void wait_for(std::atomic<int> &count, int all) {
    const timespec a_moment = {0, 200000};
    while (count.load() < all) nanosleep(&a_moment, nullptr);
}

// The file's name is only needed until all ranks have mapped it.
// NCCL_DEBUG=INFO, to where NCCL writes its log: a file is truncated.
static void log_rank(int rank, int num_ranks) {
    const char *level = getenv("NCCL_DEBUG"), *path = getenv("NCCL_DEBUG_FILE");
    if (!level || strcmp(level, "INFO") != 0) return;
    FILE *to = path ? fopen(path, "w") : stdout;
    if (!to) return;
    fprintf(to, "NCCL INFO rank %d nranks %d\n", rank, num_ranks);
    fflush(to);
    if (path) fclose(to);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) {
    EMU_CALL(ncclResult_t, __func__);
    if (num_ranks < 1 || num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks)
        return ncclInvalidArgument;
    const size_t bytes = sizeof(SharedComm) + (size_t)(num_ranks * num_ranks) * sizeof(Ring);
    const int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) return ncclSystemError;
    void *map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) return ncclSystemError;
    *comm = new ncclComm{rank, num_ranks, (SharedComm *)map, bytes};
    (*comm)->shared->joined++;
    wait_for((*comm)->shared->joined, num_ranks);
    if (rank == 0) unlink(id.internal);
    log_rank(rank, num_ranks);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    EMU_CALL(ncclResult_t, __func__);
    comm->shared->joined++;
    wait_for(comm->shared->joined, 2 * comm->num_ranks);  // a collective between ranks of a node
    munmap(comm->shared, comm->bytes);
    delete comm;
    return ncclSuccess;
}
