#include "train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "core/error.h"

namespace mantissa::train {
namespace {

constexpr double kRedrawInterval = 0.1;
constexpr int kBarWidth = 24;

bool environment_has(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0';
}

int descriptor_of(const std::ostream* out) {
  return out == &std::cerr ? STDERR_FILENO : out == &std::cout ? STDOUT_FILENO : -1;
}

bool is_terminal(const std::ostream* out) {
  const char* term = std::getenv("TERM");
  const bool dumb = term != nullptr && std::string_view(term) == "dumb";
  const int descriptor = descriptor_of(out);
  return !dumb && descriptor >= 0 && ::isatty(descriptor) == 1;
}

std::size_t columns(const std::ostream* out) {
  winsize size{};
  if (::ioctl(descriptor_of(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

template <class... Values> std::string printed(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

/// The longest prefix of UTF-8 text that fits into n columns.
std::string_view fitting(std::string_view text, std::size_t n) {
  std::size_t used = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((text[i] & 0xC0) != 0x80 && used++ == n) return text.substr(0, i);
  }
  return text;
}

/// Three significant digits, with k, M or G.
std::string short_number(double x) {
  const char* suffix = "";
  for (const char* next : {"k", "M", "G"}) {
    if (x < 1000) break;
    x /= 1000;
    suffix = next;
  }
  return printed(x < 10 ? "%.2f" : x < 100 ? "%.1f" : "%.0f", x) + suffix;
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  const auto s = static_cast<long long>(std::clamp(seconds, 0.0, 1e12) + 0.5);
  if (s >= 86400) return printed("%lldd %02lld:%02lld", s / 86400, s / 3600 % 24, s / 60 % 60);
  if (s >= 3600) return printed("%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
  return printed("%lld:%02lld", s / 60, s % 60);
}

Progress::Progress(std::int64_t total, ProgressOptions options) : total_(total), options_(std::move(options)) {
  MT_CHECK(ConfigError, total > 0, "Progress: total must be positive, got ", total);
  if (options_.out == nullptr) options_.out = &std::cerr;
  if (!options_.clock) {
    options_.clock = [] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
  }
  terminal_ = options_.terminal.value_or(is_terminal(options_.out));
  color_ = options_.color.value_or(terminal_ && !environment_has("NO_COLOR"));
  start_ = now();
  last_drawn_ = start_;
}

Progress::~Progress() {
  try {
    finish();
  } catch (...) {
    // A stream that throws must not end the program.
  }
}

double Progress::now() const { return options_.clock(); }
double Progress::active_time() const { return (paused_at_ >= 0 ? paused_at_ : now()) - start_ - paused_; }

bool Progress::due() const {
  if (options_.quiet || finished_) return false;
  return now() - last_drawn_ >= (terminal_ ? kRedrawInterval : options_.interval);
}

void Progress::update(std::int64_t step, std::string_view text) {
  step_ = step;
  if (!text.empty()) text_ = text;
  if (warm_step_ < 0 && step >= options_.warm_up) {
    warm_step_ = step;
    warm_time_ = active_time();
  }
  if (due()) draw();
}

double Progress::rate() const {
  if (warm_step_ < 0 || step_ <= warm_step_) return 0;
  const double seconds = active_time() - warm_time_;
  return seconds > 0 ? static_cast<double>(step_ - warm_step_) / seconds * options_.units_per_step : 0;
}

std::string Progress::line() const {
  const double done = std::clamp(static_cast<double>(step_) / static_cast<double>(total_), 0.0, 1.0);
  std::string out = options_.label + " ";
  if (terminal_) {
    const int filled = static_cast<int>(done * kBarWidth);
    const std::string full(static_cast<std::size_t>(filled), '#'),
        rest(static_cast<std::size_t>(kBarWidth - filled), '.');
    out += "[" + full + rest + "] ";
  }
  out += printed("%3d%% ", static_cast<int>(done * 100)) + std::to_string(step_) + "/" + std::to_string(total_);
  out += " " + format_duration(active_time());
  if (const double r = rate(); r > 0) {
    const double left = static_cast<double>(std::max<std::int64_t>(0, total_ - step_)) * options_.units_per_step / r;
    out += "<" + format_duration(left) + " " + short_number(r) + " " + options_.unit + "/s";
  }
  if (!text_.empty()) out += "  " + text_;
  return out;
}

void Progress::clear_line() {
  if (on_screen_) *options_.out << "\r\033[K";
  on_screen_ = false;
}

void Progress::draw() {
  std::string text = line();
  if (terminal_) {
    text = fitting(text, columns(options_.out) - 1);
    if (const auto open = text.find('['), close = text.find(']'); color_ && close != std::string::npos) {
      text.insert(close, "\033[0m");
      text.insert(open + 1, "\033[32m");
    }
    *options_.out << "\r\033[K" << text << std::flush;
    on_screen_ = true;
  } else {
    *options_.out << text << std::endl;
  }
  last_drawn_ = now();
  drawn_step_ = step_;
}

void Progress::print(std::string_view text) {
  if (options_.quiet) return;
  const bool redraw = on_screen_;
  clear_line();
  *options_.out << text << std::endl;
  if (redraw) draw();
}

void Progress::pause() {
  if (paused_at_ < 0) paused_at_ = now();
}
void Progress::resume() {
  if (paused_at_ < 0) return;
  paused_ += now() - paused_at_;
  paused_at_ = -1;
}

void Progress::finish() {
  if (finished_) return;
  if (!options_.quiet && step_ > 0) {
    if (terminal_ || drawn_step_ != step_) draw();
    if (terminal_) *options_.out << std::endl;
  }
  on_screen_ = false;
  finished_ = true;
}

}  // namespace mantissa::train
