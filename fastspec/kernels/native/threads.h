// How many threads share a kernel's work. Where other programs keep the processors busy, the threads of a region seldom run at the same
// time, and each waits for the other, for milliseconds, at every product: then one goes on alone for a while. No result depends on the
// number.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

static constexpr int64_t STALL = 500'000;  // nanoseconds; a thread that sleeps is awake within a fifth of it
static constexpr int64_t ALONE = 8;        // times as long as it has waited, so that trying again costs a ninth
static std::atomic<int64_t> alone_until{0};

static inline int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

static inline long team(long threads) { return threads > 1 && now() < alone_until.load(std::memory_order_relaxed) ? 1 : threads; }

// What the first thread of a region has waited for the others, and worked itself.
static inline void note(int64_t waited, int64_t worked) {
    if (waited > STALL + worked) alone_until.store(now() + ALONE * waited, std::memory_order_relaxed);
}
