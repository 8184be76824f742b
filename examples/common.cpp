#include "common.h"

#include <cstdio>
#include <iostream>

namespace examples {
namespace {

std::string fixed(double x, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

std::string mebibytes(std::int64_t bytes) { return fixed(static_cast<double>(bytes) / (1 << 20), 1); }

std::vector<std::string> row(const RunResult& r) {
  std::vector<std::string> cells{to_string(r.precision), fixed(r.loss, 4), r.score, fixed(r.seconds, 1),
                                 mebibytes(r.memory.peak)};
  for (const auto category :
       {mt::MemoryCategory::weights, mt::MemoryCategory::working_copies, mt::MemoryCategory::gradients,
        mt::MemoryCategory::optimizer_state, mt::MemoryCategory::activations})
    cells.push_back(mebibytes(r.memory.peak_by_category[static_cast<std::size_t>(category)]));
  cells.push_back(std::to_string(r.skipped));
  cells.push_back(r.scale > 0 ? fixed(r.scale, 0) : "-");
  return cells;
}

}  // namespace

void add_common_options(CLI::App& app, CommonOptions& o) {
  std::string names;
  for (const auto& name : mt::precision_names()) names += name + ", ";
  app.add_option("--precision", o.precision, names + "or all (fp32, bf16-mixed and fp16-mixed from the same seed)")
      ->capture_default_str();
  app.add_option("--device", o.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--seed", o.seed, "of the initial weights, the order of the data, and dropout")->capture_default_str();
  app.add_option("--threads", o.threads, "of the CPU backend; 0: all cores")->capture_default_str();
  app.add_option("--log", o.log, "append a JSON line per report to this file");
  app.add_flag("--quiet", o.quiet, "no progress bar");
}

int run_precisions(const CommonOptions& options, const std::string& title, const std::string& score_name,
                   const std::function<RunResult(mt::Precision, mt::Device, const mt::train::StopSignal&)>& train) {
  try {
    const mt::Device device = mt::parse_device(options.device);
    if (options.threads > 0) mt::set_num_threads(options.threads);
    std::vector<mt::Precision> precisions{mt::Precision::fp32, mt::Precision::bf16_mixed, mt::Precision::fp16_mixed};
    if (options.precision != "all") precisions = {mt::parse_precision(options.precision)};
    std::cout << title << " on " << device
              << (device.is_cpu() ? ", " + std::to_string(mt::num_threads()) + " threads" : "") << "\n";
    mt::train::Table table({"precision", "final loss", score_name, "seconds", "peak MiB", "weights", "16-bit copies",
                            "gradients", "optimizer", "activations", "skipped", "scale"});
    const mt::train::StopSignal stop;
    bool interrupted = false;
    for (const mt::Precision precision : precisions) {
      if (stop.requested()) break;
      mt::manual_seed(options.seed);
      mt::use_precision(precision);
      mt::reset_peak_memory(device);
      const RunResult result = train(precision, device, stop);
      interrupted = interrupted || result.interrupted;
      table.add_row(row(result));
    }
    std::cout << "\n" << table.str() << std::flush;
    if (interrupted) std::cout << "stopped by a signal before the end\n";
    return stop.exit_code();
  } catch (const mt::ConfigError& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  } catch (const mt::Error& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}

}  // namespace examples
