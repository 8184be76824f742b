#include "train/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/error.h"

namespace mantissa::train {

std::string system_error(int code) { return std::generic_category().message(code); }

InputFile::InputFile(const char* op, std::string path) : op_(op), path_(std::move(path)) {
  // O_NONBLOCK: opening a named pipe must not hang; it changes nothing for a regular file.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  MT_CHECK(IoError, descriptor_ >= 0, op_, ": can not open ", path_, ": ", system_error(errno));
  struct stat info {};
  const int status = ::fstat(descriptor_, &info);
  if (status == 0 && S_ISREG(info.st_mode)) {
    size_ = info.st_size;
    return;
  }
  const std::string why = status != 0 ? system_error(errno) : "it is not a regular file";
  ::close(descriptor_);
  MT_THROW(IoError, op_, ": can not read ", path_, ": ", why);
}

InputFile::~InputFile() { ::close(descriptor_); }

std::size_t InputFile::read(void* target, std::size_t n) {
  std::size_t done = 0;
  while (done < n) {
    const ssize_t got = ::read(descriptor_, static_cast<char*>(target) + done, n - done);
    if (got == 0) break;
    if (got < 0 && errno == EINTR) continue;
    MT_CHECK(IoError, got > 0, op_, ": reading ", path_, " failed: ", system_error(errno));
    done += static_cast<std::size_t>(got);
  }
  return done;
}

void write_all(const char* op, const std::string& path, int descriptor, const void* data, std::size_t n) {
  std::size_t done = 0;
  while (done < n) {
    const ssize_t written = ::write(descriptor, static_cast<const char*>(data) + done, n - done);
    if (written < 0 && errno == EINTR) continue;
    MT_CHECK(IoError, written > 0, op, ": writing ", path, " failed: ", system_error(written < 0 ? errno : ENOSPC));
    done += static_cast<std::size_t>(written);
  }
}

}  // namespace mantissa::train
