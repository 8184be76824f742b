#include "train/table.h"

#include <algorithm>
#include <cstdlib>

#include "core/error.h"

namespace mantissa::train {
namespace {

/// Code points of UTF-8 text: all bytes but the continuations.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

/// A number, perhaps with a unit right behind it ("0.93", "12 %", "3.1x").
bool is_number(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return end != text.c_str() && text.c_str() + text.size() - end <= 2;
}

}  // namespace

Table& Table::add_row(std::vector<std::string> cells) {
  MT_CHECK(ShapeError, cells.size() == header_.size(), "Table::add_row: ", cells.size(), " cells for ", header_.size(),
           " columns");
  rows_.push_back(std::move(cells));
  return *this;
}

std::string Table::str() const {
  const std::size_t n = header_.size();
  std::vector<std::size_t> width(n);
  std::vector<bool> right(n, !rows_.empty());
  for (std::size_t c = 0; c < n; ++c) {
    width[c] = width_of(header_[c]);
    for (const auto& row : rows_) {
      width[c] = std::max(width[c], width_of(row[c]));
      right[c] = right[c] && (row[c].empty() || row[c] == "-" || is_number(row[c]));
    }
  }
  std::string out;
  const auto add = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (std::size_t c = 0; c < n; ++c) {
      const std::string padding(width[c] - width_of(cells[c]), ' ');
      line += (c > 0 ? "  " : "") + (right[c] ? padding + cells[c] : cells[c] + padding);
    }
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  };
  std::vector<std::string> rule;
  for (const std::size_t w : width) rule.emplace_back(w, '-');
  add(header_);
  add(rule);
  for (const auto& row : rows_) add(row);
  return out;
}

}  // namespace mantissa::train
