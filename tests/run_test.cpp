// What a run shows and leaves behind: train/log.h, progress.h, table.h and signals.h.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <sstream>
#include <thread>

#include "files.h"
#include "train/log.h"
#include "train/progress.h"
#include "train/signals.h"
#include "train/table.h"

namespace mantissa::train {
namespace {

using testing::expect_error;
using LogTest = testing::FileTest;

TEST_F(LogTest, JsonLogLines) {
  {
    JsonLog log(path("log"));
    log.write(
        {{"step", 3}, {"loss", 2.5}, {"lr", 0.1f}, {"skipped", false}, {"note", "a \"quote\"\n"}, {"nothing", {}}});
    log.write({{"nan", std::nan("")}, {"inf", INFINITY}, {"low", -std::numeric_limits<double>::infinity()}});
    log.write({{"big", std::uint64_t{18446744073709551615u}}, {"list", std::vector<double>{1, INFINITY}}});
    log.write({{"bytes", "a\xFF"}});
    log.write({});
  }
  EXPECT_EQ(read(path("log")),
            "{\"step\":3,\"loss\":2.5,\"lr\":0.1,\"skipped\":false,\"note\":\"a "
            "\\\"quote\\\"\\n\",\"nothing\":null}\n"
            "{\"nan\":\"nan\",\"inf\":\"inf\",\"low\":\"-inf\"}\n"
            "{\"big\":18446744073709551615,\"list\":[1.0,\"inf\"]}\n"
            "{\"bytes\":\"a\xEF\xBF\xBD\"}\n"
            "{}\n");
}

TEST_F(LogTest, JsonLogAppendsAndClosesABrokenLine) {
  write("log", "{\"a\":1}\n{\"b\":");
  JsonLog first(path("log"));
  JsonLog second(path("log"));  // finds the file closed already
  first.write({{"c", 1}});
  EXPECT_EQ(read(path("log")), "{\"a\":1}\n{\"b\":\n{\"c\":1}\n");  // in the file at once
  second.write({{"d", 1}});
  JsonLog moved = std::move(first);
  moved.write({{"e", 1}});
  EXPECT_EQ(read(path("log")), "{\"a\":1}\n{\"b\":\n{\"c\":1}\n{\"d\":1}\n{\"e\":1}\n");
}

TEST_F(LogTest, JsonLogErrors) {
  expect_error<IoError>([&] { JsonLog log(path("no/folder")); }, {"JsonLog", path("no/folder"), "No such file"});
  JsonLog log(path("log"));
  expect_error<ConfigError>([&] { log.write({{"a", 1}, {"a", 2}}); }, {"\"a\"", "twice"});
  if (::access("/dev/full", W_OK) == 0) {
    JsonLog full("/dev/full");
    expect_error<IoError>([&] { full.write({{"a", 1}}); }, {"/dev/full", "No space left"});
  }
}

TEST(Progress, PlainLinesAreRare) {
  std::ostringstream out;
  double time = 0;
  {
    Progress progress(100, {.interval = 10, .warm_up = 5, .out = &out, .clock = [&] { return time; }});
    for (int step = 1; step <= 100; ++step) {
      time += step <= 5 ? 4 : 0.5;  // a slow start: 20 s for 5 steps
      if (step == 50) {
        progress.pause();
        time += 1000;  // validation
        progress.resume();
      }
      progress.update(step, "loss 0.5");
    }
    EXPECT_DOUBLE_EQ(progress.rate(), 2);
  }
  const std::string text = out.str();
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  const auto lines = std::count(text.begin(), text.end(), '\n');
  EXPECT_GE(lines, 5);
  EXPECT_LE(lines, 9);
  EXPECT_NE(text.find("train 100% 100/100 1:08<0:00 2.00 steps/s  loss 0.5\n"), std::string::npos) << text;
}

TEST(Progress, RemainingTimeLeavesOutTheWarmUp) {
  std::ostringstream out;
  double time = 0;
  Progress progress(1000,
                    {.unit = "images", .units_per_step = 64, .interval = 1, .warm_up = 1, .out = &out, .clock = [&] {
                       return time;
                     }});
  time = 100;
  progress.update(1);
  time = 110;
  progress.update(11);
  EXPECT_NE(out.str().find("11/1000 1:50<16:29 64.0 images/s\n"), std::string::npos) << out.str();
}

TEST(Progress, TerminalLineColorAndQuiet) {
  const auto run = [](ProgressOptions options) {
    std::ostringstream out;
    double time = 0;
    options.out = &out;
    options.clock = [&] { return time; };
    Progress progress(4, options);
    for (int step = 1; step <= 4; ++step) {
      time += 1;
      if (progress.due()) progress.update(step, "scale 65536");
      if (step == 2) progress.print("saved");
    }
    progress.finish();
    progress.update(3);
    return out.str();
  };
  const std::string plain = run({.terminal = true, .color = false});
  EXPECT_NE(plain.find("\r\033[Ktrain [############............]  50% 2/4"), std::string::npos) << plain;
  EXPECT_NE(plain.find("\r\033[Ksaved\n"), std::string::npos);
  EXPECT_EQ(plain.find("\033[32m"), std::string::npos);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), '\n'), 2);
  EXPECT_NE(run({.terminal = true, .color = true}).find("[\033[32m####"), std::string::npos);
  ASSERT_EQ(::setenv("NO_COLOR", "1", 1), 0);
  EXPECT_EQ(run({.terminal = true}).find("\033[32m"), std::string::npos);
  ::unsetenv("NO_COLOR");
  EXPECT_EQ(run({.quiet = true, .terminal = true}), "");
  EXPECT_EQ(run({}).find('\r'), std::string::npos);  // a string stream is no terminal
  expect_error<ConfigError>([] { Progress progress(0); }, {"total"});
}

TEST(Progress, Durations) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(65), "1:05");
  EXPECT_EQ(format_duration(7384), "2:03:04");
  EXPECT_EQ(format_duration(273900), "3d 04:05");
  EXPECT_EQ(format_duration(INFINITY), "?");
}

TEST(Table, AlignsNumbersRight) {
  Table table({"precision", "accuracy", "skipped"});
  table.add_row({"fp32", "0.9312", "-"}).add_row({"fp16-mixed µ", "0.93", "12"});
  EXPECT_EQ(table.str(),
            "precision     accuracy  skipped\n"
            "------------  --------  -------\n"
            "fp32            0.9312        -\n"
            "fp16-mixed µ      0.93       12\n");
  expect_error<ShapeError>([&] { table.add_row({"x"}); }, {"1 cells for 3 columns"});
}

TEST(StopSignal, FirstSetsTheFlag) {
  {
    StopSignal stop;
    EXPECT_FALSE(stop.requested());
    EXPECT_EQ(stop.exit_code(), 0);
    expect_error<ConfigError>([] { StopSignal second; }, {"another one is alive"});
    ::raise(SIGTERM);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), SIGTERM);
    EXPECT_EQ(stop.exit_code(), 143);
  }
  struct sigaction action {};
  ASSERT_EQ(::sigaction(SIGTERM, nullptr, &action), 0);
  EXPECT_EQ(action.sa_handler, SIG_DFL);            // restored
  EXPECT_FALSE(StopSignal({SIGUSR1}).requested());  // a new one starts afresh
  expect_error<ConfigError>([] { StopSignal stop({SIGINT, SIGKILL}); }, {"can not catch signal 9"});
  ASSERT_EQ(::sigaction(SIGINT, nullptr, &action), 0);
  EXPECT_EQ(action.sa_handler, SIG_DFL);
}

TEST(StopSignalDeathTest, SecondEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StopSignal stop;
        ::raise(SIGINT);
        ::raise(SIGINT);
        std::this_thread::sleep_for(std::chrono::seconds(10));
      },
      ::testing::ExitedWithCode(130), "");
}

}  // namespace
}  // namespace mantissa::train
