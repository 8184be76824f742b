#pragma once
// For the readers and writers of this folder: an open file that closes itself, and errors with their reason.

#include <cstddef>
#include <cstdint>
#include <string>

namespace mantissa::train {

/// The text of an errno value.
std::string system_error(int code);

/// A regular file that is open for reading; IoError when it is missing, unreadable, or no regular file.
class InputFile {
 public:
  InputFile(const char* op, std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }  // when it was opened
  int descriptor() const { return descriptor_; }
  /// Up to n of the next bytes; fewer only at the end of the file.
  std::size_t read(void* target, std::size_t n);

 private:
  const char* op_;
  std::string path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

/// Writes all n bytes; IoError naming op and path.
void write_all(const char* op, const std::string& path, int descriptor, const void* data, std::size_t n);

}  // namespace mantissa::train
