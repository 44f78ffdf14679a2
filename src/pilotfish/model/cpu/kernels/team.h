// Threads that compute a kernel together, and go on while one of them has lost its core.
//
// A region is one function that every member runs from its beginning to its end; its work is in phases:
//
//     team.run([&](Member& member) {
//       member.for_each(10, first);               // each chunk by whoever takes it; ends when all 10 are done
//       member.compute_each(99, second, publish);  // sees all that `first` wrote
//     });
//
// Members take chunks from one counter, and a phase ends when its chunks are done, not when all members have arrived.
// A member without a core that holds no chunk is not missed: it finds its phases over when it comes back and runs
// through them to where the others are. A chunk whose member has been away for longer than a chunk takes is computed again
// by who waits for it (`compute_each`); whoever is ready first publishes it. Whoever waits spins for a moment, since most
// waits are shorter than a sleep takes, then sleeps, so that others may have its core. Between its phases a region may only
// compute what depends on nothing that members write.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace pilotfish {

using Clock = std::chrono::steady_clock;

constexpr Clock::duration kSpin = std::chrono::microseconds(50);
constexpr Clock::duration kLongestSpin = std::chrono::microseconds(500);
constexpr int kChunkBits = 24;         // a phase has fewer than 2^24 chunks
constexpr int64_t kMaxClaims = 4096;  // chunks of a phase that can be computed again

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Whether `holds()`; waits for that, but not for longer than `most`.
template <typename F>
bool comes(const F& holds, Clock::duration most) {
  const auto until = Clock::now() + most;
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

// Returns when `word` is no longer `old`.
inline void wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
  if (!comes([&] { return word.load(std::memory_order_acquire) != old; }, kSpin))
    word.wait(old, std::memory_order_acquire);
}

class Member;

class Team {
 public:
  // The calling thread's own. A child process that was forked has none of its parent's threads, so it begins anew.
  static Team& mine() {
    thread_local std::unique_ptr<Team> team;
    if (team && team->process_ != getpid()) team.release()->abandon();
    if (!team) team.reset(new Team());
    return *team;
  }

  ~Team() {
    if (process_ != getpid()) abandon();
    stopping_ = true;
    state_.fetch_add(2);
    state_.notify_all();
    for (std::thread& worker : workers_)
      if (worker.joinable()) worker.join();
  }

  // Calls f(Member&) on `size` members, of which the calling thread is one.
  template <typename F>
  void run(int size, const F& f);

 private:
  friend class Member;

  Team() : process_(getpid()) {}

  void abandon() {
    for (std::thread& worker : workers_) new (&worker) std::thread();  // the thread is another process's
  }

  void work(int index, uint32_t seen);

  template <typename F>
  static void call(const void* f, Member& member) {
    (*static_cast<const F*>(f))(member);
  }

  const pid_t process_;
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};

  // The region: what it runs, for how many members, from which phase on.
  void (*call_)(const void*, Member&) = nullptr;
  const void* function_ = nullptr;
  int size_ = 1;
  uint64_t first_phase_ = 0;
  std::atomic<uint32_t> state_{0};   // twice the number of regions, and 1 while one is open
  std::atomic<uint32_t> inside_{0};  // workers that run it

  // The phase's number and the next chunk, which alone say what is over; chunks done; phases ended, to sleep on; of each
  // chunk the last phase that it was claimed in.
  alignas(64) std::atomic<uint64_t> next_{uint64_t{1} << kChunkBits};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> ended_{0};
  uint64_t phase_ = 1;  // of the next region's first; the caller's own
  const std::unique_ptr<std::atomic<uint64_t>[]> claims_{new std::atomic<uint64_t>[kMaxClaims]()};
};

class Member {
 public:
  // Whether this is the thread that began the region.
  bool leads() const { return leads_; }

  // Calls f(i) for i in [0, count), each once, on any members. Returns when all are done.
  template <typename F>
  void for_each(int64_t count, const F& f) {
    run_phase(count, f, [](int64_t) {}, false);
  }

  // Calls compute(i), then publish(i) on the same member, for i in [0, count). A chunk may be computed by several, with
  // the same result in memory of their own; it is published once. Computing may read what later phases overwrite: its
  // result is then not published.
  template <typename F, typename G>
  void compute_each(int64_t count, const F& compute, const G& publish) {
    run_phase(count, compute, publish, count <= kMaxClaims);
  }

 private:
  friend class Team;

  Member(Team* team, uint64_t phase, bool leads) : team_(team), phase_(phase), leads_(leads) {}

  template <typename F, typename G>
  void run_phase(int64_t count, const F& compute, const G& publish, bool again) {
    if (!team_)
      for (int64_t i = 0; i < count; ++i) compute(i), publish(i);
    if (!team_ || count == 0) return;
    const uint64_t phase = phase_++;
    Clock::duration longest{};
    for (int64_t i; (i = take(phase, count)) < count;) {
      if (i < 0) return;
      const auto began = Clock::now();
      compute(i);
      if (again && !claim(i, phase)) continue;
      publish(i);
      if (finish(phase, count)) return;
      longest = std::max(longest, Clock::now() - began);
    }
    const auto patience = std::max(kSpin, 2 * longest);
    while (again && patience <= kLongestSpin) {
      if (comes([&] { return is_over(phase); }, patience)) return;
      const int64_t i = missing(phase, count);
      if (i < 0) break;
      compute(i);
      if (!claim(i, phase)) continue;
      publish(i);
      if (finish(phase, count)) return;
    }
    for (;;) {
      const uint32_t ended = team_->ended_.load(std::memory_order_acquire);
      if (is_over(phase)) return;
      wait_while(team_->ended_, ended);
    }
  }

  // Compares the bits of the number that `next_` has: a phase that is waited for is never so many behind.
  static bool is_of(uint64_t next, uint64_t phase) { return next >> kChunkBits == (phase << kChunkBits) >> kChunkBits; }

  bool is_over(uint64_t phase) const { return !is_of(team_->next_.load(std::memory_order_acquire), phase); }

  // The next chunk; `count` where none is left; -1 where the phase is over.
  int64_t take(uint64_t phase, int64_t count) {
    constexpr uint64_t kChunks = (uint64_t{1} << kChunkBits) - 1;
    uint64_t next = team_->next_.load(std::memory_order_acquire);
    do {
      if (!is_of(next, phase)) return -1;
      if (static_cast<int64_t>(next & kChunks) >= count) return count;
    } while (!team_->next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel));
    return static_cast<int64_t>(next & kChunks);
  }

  // Whether this member is the first to have computed a chunk; one who comes too late, even for the phase, is not.
  bool claim(int64_t chunk, uint64_t phase) {
    uint64_t last = team_->claims_[chunk].load(std::memory_order_acquire);
    return last < phase && team_->claims_[chunk].compare_exchange_strong(last, phase);
  }

  // A chunk that nobody has claimed yet, or -1.
  int64_t missing(uint64_t phase, int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
      if (team_->claims_[i].load(std::memory_order_acquire) < phase) return i;
    return -1;
  }

  // Counts a chunk as done. True if it was the last: then the next phase has begun.
  bool finish(uint64_t phase, int64_t count) {
    if (team_->done_.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return false;
    team_->done_.store(0, std::memory_order_relaxed);
    team_->next_.store((phase + 1) << kChunkBits, std::memory_order_release);
    team_->ended_.fetch_add(1, std::memory_order_acq_rel);
    team_->ended_.notify_all();
    return true;
  }

  Team* team_;  // null: this member is the only one
  uint64_t phase_;
  const bool leads_;
};

template <typename F>
void Team::run(int size, const F& f) {
  if (size <= 1) {
    Member alone(nullptr, 0, true);
    return f(alone);
  }
  while (static_cast<int>(workers_.size()) < size - 1)
    workers_.emplace_back(&Team::work, this, static_cast<int>(workers_.size()) + 1, state_.load());
  call_ = &Team::call<F>;
  function_ = &f;
  size_ = size;
  first_phase_ = phase_;
  state_.fetch_add(1);  // open
  state_.notify_all();
  Member self(this, first_phase_, true);
  f(self);
  phase_ = self.phase_;
  state_.fetch_add(1);  // closed: nobody enters any more
  for (uint32_t left; (left = inside_.load()) > 0;) wait_while(inside_, left);
}

// `seen` is the state whose region, if it is open, this worker does not run.
inline void Team::work(int index, uint32_t seen) {
  while (!stopping_.load()) {
    const uint32_t state = state_.load();
    if (state == seen || state % 2 == 0) {
      wait_while(state_, state);
      continue;
    }
    seen = state;
    inside_.fetch_add(1);
    if (state_.load() == state && index < size_) {  // open still, and now until this worker has left
      Member self(this, first_phase_, false);
      call_(function_, self);
    }
    inside_.fetch_sub(1);
    inside_.notify_all();
  }
}

}  // namespace pilotfish
