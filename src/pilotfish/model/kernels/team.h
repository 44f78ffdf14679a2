// Threads that compute a kernel together, and go on while one of them has lost its core.
//
// A region is one function that every member runs from its beginning to its end; its work is in phases:
//
//     team.run([&](Member& member) {
//       member.for_each(10, first);     // each chunk by whoever takes it; ends when all 10 are done
//       member.for_each(99, second);    // sees all that `first` wrote
//     });
//
// Members take chunks from one counter, and a phase ends when its chunks are done, not when all members have arrived.
// A member without a core that holds no chunk is not missed: it finds its phases over when it comes back and runs
// through them to where the others are. Whoever waits spins for a moment, since most waits are shorter than a sleep
// takes, then sleeps, so that whoever holds the last chunk may have its core. Between its phases a region may only
// compute what depends on nothing that members write.

#pragma once

#include <unistd.h>

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

constexpr std::chrono::microseconds kSpin{50};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Returns when `word` is no longer `old`.
inline void wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
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
  uint32_t first_phase_ = 0;
  std::atomic<uint32_t> state_{0};   // twice the number of regions, and 1 while one is open
  std::atomic<uint32_t> inside_{0};  // workers that run it

  // The phase: its number << 32 | the next chunk; chunks done; its number again, to wait for.
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Member {
 public:
  // Whether this is the thread that began the region.
  bool leads() const { return leads_; }

  // Calls f(i) for i in [0, count), each once, on any members. Returns when all are done.
  template <typename F>
  void for_each(int64_t count, const F& f) {
    if (!team_)
      for (int64_t i = 0; i < count; ++i) f(i);
    if (!team_ || count == 0) return;
    const uint32_t phase = phase_++;
    for (uint64_t next = team_->next_.load(std::memory_order_acquire);;) {
      if (static_cast<uint32_t>(next >> 32) != phase) return;
      if (static_cast<uint32_t>(next) >= count) break;
      if (!team_->next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      f(static_cast<int64_t>(next & 0xffffffffu));
      if (team_->done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) return end(phase);
      next = team_->next_.load(std::memory_order_acquire);
    }
    wait_while(team_->phase_, phase);
  }

 private:
  friend class Team;

  Member(Team* team, uint32_t phase, bool leads) : team_(team), phase_(phase), leads_(leads) {}

  void end(uint32_t phase) {
    team_->done_.store(0, std::memory_order_relaxed);
    team_->next_.store(uint64_t{phase + 1} << 32, std::memory_order_release);
    team_->phase_.store(phase + 1, std::memory_order_release);
    team_->phase_.notify_all();
  }

  Team* team_;  // null: this member is the only one
  uint32_t phase_;
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
  first_phase_ = phase_.load();
  state_.fetch_add(1);  // open
  state_.notify_all();
  Member self(this, first_phase_, true);
  f(self);
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
