#pragma once
// Progress of a training run. On a terminal one line that is rewritten, elsewhere a plain line every few
// seconds. Our own small class: the libraries that exist for this are not in the archives we build from.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace mantissa::train {

struct ProgressOptions {
  std::string label = "train";
  std::string unit = "steps";   // of the rate
  double units_per_step = 1;    // for example the batch size, with unit = "images"
  bool quiet = false;           // print nothing
  double interval = 10;         // seconds between plain lines; a terminal is redrawn ten times a second
  std::int64_t warm_up = 10;    // first steps, slower than the rest, that rate and remaining time leave out
  std::ostream* out = nullptr;  // default: std::cerr
  /// Default: whether `out` is std::cerr or std::cout, and that is a terminal.
  std::optional<bool> terminal = {};
  std::optional<bool> color = {};      // default: on a terminal, unless NO_COLOR is set
  std::function<double()> clock = {};  // seconds; default: the monotonic clock
};

class Progress {
 public:
  explicit Progress(std::int64_t total, ProgressOptions options = {});
  ~Progress();  // ends the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `step` steps are done; `text` ends the line: loss, scale, skipped steps. Cheap when nothing is due.
  void update(std::int64_t step, std::string_view text = {});
  /// True when the next update() prints: then it is worth reading the loss back for it.
  bool due() const;
  /// A whole line of its own, above the bar.
  void print(std::string_view line);
  /// Time that is no training (validation, a checkpoint) counts neither for the rate nor for what remains.
  void pause();
  void resume();
  /// Prints the last state and ends the line. Later calls do nothing.
  void finish();

  /// Units per second since the warm-up; 0 while unknown.
  double rate() const;

 private:
  double now() const;
  double active_time() const;
  void draw();
  std::string line() const;
  void clear_line();

  std::int64_t total_, step_ = 0;
  ProgressOptions options_;
  bool terminal_ = false, color_ = false, on_screen_ = false, finished_ = false;
  std::string text_;
  double start_ = 0, last_drawn_ = 0, warm_time_ = 0, paused_at_ = -1, paused_ = 0;
  std::int64_t warm_step_ = -1, drawn_step_ = -1;
};

/// "1:05", "2:03:04" or "3d 04:05".
std::string format_duration(double seconds);

}  // namespace mantissa::train
