#pragma once
// What the example programs share: the common options, and the table that compares precisions.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mantissa/mantissa.h"

namespace examples {

namespace mt = mantissa;

struct CommonOptions {
  std::string precision = "fp16-mixed", device = "auto", log;
  std::uint64_t seed = 1;
  int threads = 0;
  bool quiet = false;
};

/// Adds --precision, --device, --seed, --threads, --log and --quiet.
void add_common_options(CLI::App& app, CommonOptions& options);

/// How one training run went.
struct RunResult {
  mt::Precision precision = mt::Precision::fp32;
  double loss = 0, seconds = 0;
  std::string score = {};  // accuracy, bits per byte, ...
  mt::MemoryStats memory = {};
  std::int64_t skipped = 0;
  double scale = 0;  // 0: the scaler was not needed
  bool interrupted = false;
};

/// Runs `train` once for each requested precision ("all": fp32, bf16-mixed, fp16-mixed) from the same seed, and prints
/// the table. Returns the exit code of the program; errors of the library are printed, not thrown.
int run_precisions(const CommonOptions& options, const std::string& title, const std::string& score_name,
                   const std::function<RunResult(mt::Precision, mt::Device, const mt::train::StopSignal&)>& train);

}  // namespace examples
