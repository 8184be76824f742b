#pragma once
// Aligned text tables for the summaries at the end of a run.

#include <string>
#include <vector>

namespace mantissa::train {

/// Columns are as wide as their widest cell; those that hold only numbers (or nothing) are aligned to the
/// right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  /// ShapeError unless there is one cell for each column.
  Table& add_row(std::vector<std::string> cells);
  std::string str() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace mantissa::train
