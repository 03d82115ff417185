// How many threads share a kernel's work. Where other programs keep the processors busy, the threads of a region seldom run at the same
// time, and each waits for the others, for milliseconds, at every product: then fewer go on for a while. No result depends on the number.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

static constexpr int64_t STALL = 500'000;  // nanoseconds; a thread that sleeps is awake within a fifth of it
static constexpr int64_t RELIEF = 8;       // times as long as was waited, so that trying again costs a ninth
static std::atomic<int64_t> relieved_until{0}, last_wait{0}, last_end{0};
static std::atomic<long> fewer{1};

static inline int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// How many threads take part, of at most `threads`.
static inline long team(long threads) {
    long most = fewer.load(std::memory_order_relaxed);
    return threads > most && now() < relieved_until.load(std::memory_order_relaxed) ? most : threads;
}

// What the first of a region's `used` threads has waited for the others, and worked itself. One long wait may be chance; two that take more
// time than lies between them are not: half as many threads find a processor each more often.
static inline void note(int64_t waited, int64_t worked, long used) {
    if (used < 2 || waited <= STALL + worked) return;
    int64_t end = now(), both = waited + last_wait.exchange(waited), between = end - waited - last_end.exchange(end);
    if (between > both) return;
    fewer.store(used / 2);
    relieved_until.store(end + RELIEF * both);
    last_wait.store(0);
}
