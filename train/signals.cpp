#include "train/signals.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "core/error.h"
#include "train/file.h"

namespace mantissa::train {
namespace {

// Lock-free atomics may be used in a handler, and unlike sig_atomic_t by several threads.
std::atomic<int> received{0};
std::atomic<bool> installed{false};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void on_stop_signal(int signal) {
  int none = 0;
  if (!received.compare_exchange_strong(none, signal)) _exit(128 + signal);
}

}  // namespace

StopSignal::StopSignal(const std::vector<int>& signals) {
  MT_CHECK(ConfigError, !installed.exchange(true),
           "StopSignal: another one is alive; the process can have one at a time");
  received = 0;
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;  // reads and writes in progress go on
  sigemptyset(&action.sa_mask);
  for (const int signal : signals) {
    Previous previous{signal, {}};
    if (::sigaction(signal, &action, &previous.action) != 0) {
      const int code = errno;
      restore();
      MT_THROW(ConfigError, "StopSignal: can not catch signal ", signal, ": ", system_error(code));
    }
    previous_.push_back(previous);
  }
}

StopSignal::~StopSignal() { restore(); }

void StopSignal::restore() noexcept {
  for (auto it = previous_.rbegin(); it != previous_.rend(); ++it) ::sigaction(it->signal, &it->action, nullptr);
  installed = false;
}

int StopSignal::signal() const { return received.load(std::memory_order_relaxed); }

}  // namespace mantissa::train
