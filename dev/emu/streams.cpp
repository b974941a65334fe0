// Streams as threads (EMU_STREAMS=1): what is put on a stream runs when its thread comes to it,
// next to the host and the other streams, and only events, waits and synchronisation order them, as
// on a GPU. Without it work is done at the call. EMU_SLOW_STREAM=n holds the n-th stream back, so
// that work that does not wait for it runs far ahead.
#include "engine.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace emu {
struct Worker {
    int number;
    bool busy = false;
    std::deque<std::function<void()>> work;
};

static std::mutex mutex;
static std::condition_variable changed;
static std::vector<Worker *> workers;  // never freed: their threads outlive main
static size_t parked;
static bool leaving;

// The program ends: a thread that would touch what static destructors free stays here.
static void park(std::unique_lock<std::mutex> &lock) {
    parked++;
    changed.notify_all();
    lock.unlock();
    for (;;) pause();
}

void park_if_leaving() {
    std::unique_lock<std::mutex> lock(mutex);
    if (leaving) park(lock);
}

static void run(Worker *w) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [w] { return leaving || !w->work.empty(); });
        if (leaving) park(lock);
        std::function<void()> work = std::move(w->work.front());
        w->work.pop_front();
        w->busy = true;
        lock.unlock();
        if (w->number == opt.slow_stream) usleep(1000 * (useconds_t)opt.lag_ms);
        work();
        lock.lock();
        w->busy = false;
        changed.notify_all();
    }
}

// Work that is left when the program ends is not done, as on a GPU.
static void stop() {
    std::unique_lock<std::mutex> lock(mutex);
    leaving = true;
    changed.notify_all();
    changed.wait_for(lock, std::chrono::seconds(5), [] { return parked == workers.size(); });
}

Worker *start_worker() {
    if (!opt.streams) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    if (workers.empty()) atexit(stop);
    workers.push_back(new Worker);
    workers.back()->number = (int)workers.size();
    std::thread(run, workers.back()).detach();
    return workers.back();
}

void put_work(Worker *w, std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    w->work.push_back(std::move(work));
    changed.notify_all();
}

static bool idle(const Worker *w) { return w->work.empty() && !w->busy; }

bool worker_idle(const Worker *w) {
    std::lock_guard<std::mutex> lock(mutex);
    return idle(w);
}

void drain(const Worker *w) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [w] { return idle(w); });
}

void drain_all() {
    std::unique_lock<std::mutex> lock(mutex);
    for (const Worker *w : workers) changed.wait(lock, [w] { return idle(w); });
}

// ------------------------------------------------------------------------------------------------
// Marks: an event counts how often it was recorded, and how often its stream has come to that

uint64_t mark_set(Mark *m) {
    std::lock_guard<std::mutex> lock(mutex);
    return ++m->set;
}

void mark_reach(Mark *m, uint64_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    m->reached = std::max(m->reached, count);
    changed.notify_all();
}

uint64_t mark_now(const Mark *m) {
    std::lock_guard<std::mutex> lock(mutex);
    return m->set;
}

bool mark_reached(const Mark *m) {
    std::lock_guard<std::mutex> lock(mutex);
    return m->reached >= m->set;
}

void mark_wait(const Mark *m, uint64_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [m, count] { return leaving || m->reached >= count; });
}
}  // namespace emu
