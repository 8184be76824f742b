#pragma once
// Stopping cleanly: the first SIGINT or SIGTERM sets a flag that the training loop reads, the second ends the
// process.

#include <signal.h>  // sigaction is POSIX, not in <csignal>
#include <vector>

namespace mantissa::train {

/// While it lives, the signals are caught. The loop asks requested() once a step, saves a checkpoint and
/// returns. A second signal exits at once with 128 + its number. The earlier handlers come back on
/// destruction. One at a time.
class StopSignal {
 public:
  explicit StopSignal(const std::vector<int>& signals = {SIGINT, SIGTERM});
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool requested() const { return signal() != 0; }
  /// The signal that came, or 0.
  int signal() const;
  /// What the process should return after it has saved: 128 + signal, or 0 when none came.
  int exit_code() const { return requested() ? 128 + signal() : 0; }

 private:
  void restore() noexcept;
  struct Previous {
    int signal;
    struct sigaction action;
  };
  std::vector<Previous> previous_;
};

}  // namespace mantissa::train
