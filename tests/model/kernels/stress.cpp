// Threads that compute together, more of them than there are cores, through many short phases: every chunk is done once,
// in every phase, and what a phase wrote is seen by the next one. Prints how many regions went wrong; exit status 1 then.
// The argument is the number of regions. Built with -fsanitize=thread, it also fails where no order is
// certain.

#include <cstdio>
#include <cstdlib>

#include "team.h"

using namespace pilotfish;

namespace {

constexpr int kMembers = 4, kRounds = 40, kMost = 37;

// In each round `first` takes one more than `second` has, then `second` what its neighbour in `first` has. Read by chunks
// that are computed again, perhaps while the next round writes it, `first` is of atomics.
bool is_right(int64_t count) {
  std::vector<std::atomic<int64_t>> first(count);
  std::vector<int64_t> second(count), times(count);
  Team::mine().run(kMembers, [&](Member& member) {
    for (int round = 0; round < kRounds; ++round) {
      member.for_each(count, [&](int64_t i) { first[i].store(second[i] + 1, std::memory_order_relaxed); });
      thread_local int64_t own;
      member.compute_each(
          count, [&](int64_t i) { own = first[(i + 1) % count].load(std::memory_order_relaxed); },
          [&](int64_t i) {
            second[i] = own;
            ++times[i];
          });
    }
  });
  for (int64_t i = 0; i < count; ++i)
    if (second[i] != kRounds || times[i] != kRounds) return false;
  return true;
}

}  // namespace

int main(int, char** arguments) {
  const int regions = std::atoi(arguments[1]);
  int wrong = 0;
  for (int region = 0; region < regions; ++region) wrong += !is_right(1 + region % kMost);
  std::printf("%d regions, %d wrong\n", regions, wrong);
  return wrong > 0;
}
