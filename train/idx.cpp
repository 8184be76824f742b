#include "train/idx.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "train/file.h"

namespace mantissa::train {
namespace {

constexpr const char* kOp = "read_idx";
constexpr std::int64_t kMostElements = std::int64_t{1} << 62;

std::string hex(std::uint32_t value, int digits) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%0*X", digits, value);
  return text;
}

/// The bytes of a file, inflated if they are gzip. Never produces more than is asked for, so that no file can
/// bomb us.
class ByteReader {
 public:
  explicit ByteReader(const std::string& path) : file_(kOp, path), buffer_(std::size_t{1} << 16) {
    refill();
    gzip_ = available_ >= 2 && next_[0] == 0x1F && next_[1] == 0x8B;
    if (gzip_) {
      // 16 + MAX_WBITS: a gzip wrapper, whose CRC-32 and length zlib then checks.
      MT_CHECK(OutOfMemoryError, inflateInit2(&stream_, 16 + MAX_WBITS) == Z_OK, kOp, ": no memory to inflate ", path);
    }
  }
  ~ByteReader() {
    if (gzip_) inflateEnd(&stream_);
  }
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  std::int64_t offset() const { return offset_; }
  bool gzip() const { return gzip_; }
  std::int64_t file_size() const { return file_.size(); }

  /// Up to n of the next bytes; fewer only at the end.
  std::size_t read(void* target, std::size_t n) {
    const std::size_t done =
        gzip_ ? read_gzip(static_cast<std::uint8_t*>(target), n) : read_plain(static_cast<std::uint8_t*>(target), n);
    offset_ += static_cast<std::int64_t>(done);
    return done;
  }

  /// What comes after the data must be nothing.
  void expect_end(std::int64_t expected) {
    std::uint8_t extra = 0;
    MT_CHECK(FormatError, read(&extra, 1) == 0, kOp, ": ", file_.path(), ": offset ", expected,
             ": found trailing bytes, expected ", "the end of the data after ", expected, " bytes");
    if (gzip_ && available_ == 0) refill();
    MT_CHECK(FormatError, !gzip_ || available_ == 0, kOp, ": ", file_.path(), ": offset ", file_offset(),
             " of the gzip file: found ", "trailing bytes, expected the end of the file after the gzip stream");
  }

 private:
  std::int64_t file_offset() const { return consumed_ - static_cast<std::int64_t>(available_); }

  void refill() {
    available_ = file_.read(buffer_.data(), buffer_.size());
    consumed_ += static_cast<std::int64_t>(available_);
    next_ = buffer_.data();
  }

  std::size_t read_plain(std::uint8_t* target, std::size_t n) {
    std::size_t done = 0;
    while (done < n) {
      if (available_ == 0) refill();
      if (available_ == 0) break;
      const std::size_t part = std::min(n - done, available_);
      std::copy_n(next_, part, target + done);
      next_ += part;
      available_ -= part;
      done += part;
    }
    return done;
  }

  std::size_t read_gzip(std::uint8_t* target, std::size_t n) {
    std::size_t done = 0;
    while (done < n && !ended_) {
      if (available_ == 0) refill();
      MT_CHECK(FormatError, available_ > 0, kOp, ": ", file_.path(), ": offset ", consumed_,
               " of the gzip file: found the end of the ", "file, expected more of the gzip stream (",
               offset_ + static_cast<std::int64_t>(done), " bytes inflated): truncated");
      const auto part = static_cast<uInt>(std::min(n - done, std::size_t{1} << 30));
      stream_.next_in = next_;
      stream_.avail_in = static_cast<uInt>(available_);
      stream_.next_out = target + done;
      stream_.avail_out = part;
      const int status = inflate(&stream_, Z_NO_FLUSH);
      next_ = stream_.next_in;
      available_ = stream_.avail_in;
      done += part - stream_.avail_out;
      ended_ = status == Z_STREAM_END;
      MT_CHECK(OutOfMemoryError, status != Z_MEM_ERROR, kOp, ": no memory to inflate ", file_.path());
      MT_CHECK(FormatError, status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, kOp, ": ", file_.path(),
               ": offset ", file_offset(), " of the gzip file: found a broken gzip stream (",
               stream_.msg ? stream_.msg : "no reason given", "), expected valid data and a matching CRC-32");
    }
    return done;
  }

  InputFile file_;
  std::vector<std::uint8_t> buffer_;
  std::uint8_t* next_ = nullptr;
  std::size_t available_ = 0;               // unread bytes at next_
  std::int64_t consumed_ = 0, offset_ = 0;  // bytes taken from the file; bytes handed out
  bool gzip_ = false, ended_ = false;
  z_stream stream_{};
};

std::uint32_t big_endian(const std::uint8_t* p) {
  return std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | p[3];
}

/// Reads and judges the header: two zero bytes, the type, the rank, then each size in four bytes, most
/// significant first.
Shape read_header(const std::string& path, ByteReader& in) {
  std::uint8_t magic[4] = {};
  const std::size_t got = in.read(magic, 4);
  MT_CHECK(FormatError, got == 4, kOp, ": ", path, ": offset 0: found ", got,
           " bytes, expected an IDX header of at least 8");
  MT_CHECK(FormatError, magic[0] == 0 && magic[1] == 0, kOp, ": ", path, ": offset 0: found magic ",
           hex(big_endian(magic), 8), ", expected two zero bytes, a type code and a rank");
  MT_CHECK(FormatError, magic[2] == 0x08, kOp, ": ", path, ": offset 2: found type code ", hex(magic[2], 2),
           ", expected 0x08 (unsigned bytes)");
  MT_CHECK(FormatError, magic[3] >= 1 && magic[3] <= kMaxRank, kOp, ": ", path, ": offset 3: found rank ",
           int{magic[3]}, ", expected 1 to ", kMaxRank);
  Shape shape;
  std::int64_t elements = 1;
  for (int axis = 0; axis < magic[3]; ++axis) {
    std::uint8_t bytes[4];
    const std::int64_t at = in.offset();
    MT_CHECK(FormatError, in.read(bytes, 4) == 4, kOp, ": ", path, ": offset ", at,
             ": found the end of the data, expected the size of ", "dimension ", axis, " of ", int{magic[3]});
    const std::int64_t size = big_endian(bytes);
    MT_CHECK(FormatError, size > 0, kOp, ": ", path, ": offset ", at, ": found a dimension of 0, expected at least 1");
    MT_CHECK(FormatError, !__builtin_mul_overflow(elements, size, &elements) && elements <= kMostElements, kOp, ": ",
             path, ": offset ", at, ": found dimensions whose product overflows, expected at most 2^62 elements");
    shape.push_back(size);
  }
  return shape;
}

/// The claim of a header against the size of the file, before memory is taken for it.
void check_size(const std::string& path, const ByteReader& in, std::int64_t elements) {
  constexpr std::int64_t kMostPerByte = 1032;  // deflate can not do better
  const std::int64_t header = in.offset(), rest = in.file_size() - header;
  if (in.gzip()) {
    MT_CHECK(FormatError, elements / kMostPerByte <= in.file_size(), kOp, ": ", path, ": offset ", header,
             ": found a header that claims ", elements, " bytes of data, expected at most ", kMostPerByte,
             " for each of the ", in.file_size(), " compressed bytes");
    return;
  }
  MT_CHECK(FormatError, elements <= rest, kOp, ": ", path, ": offset ", header, ": found ", rest,
           " bytes of data, expected ", elements, " as the header claims: truncated");
  MT_CHECK(FormatError, elements == rest, kOp, ": ", path, ": offset ", header + elements, ": found ", rest - elements,
           " trailing bytes, expected the end of the file");
}

}  // namespace

Tensor read_idx(const std::string& path) {
  ByteReader in(path);
  const Shape shape = read_header(path, in);
  const std::int64_t elements = numel(shape), header = in.offset();
  check_size(path, in, elements);
  const MemoryScope scope(MemoryCategory::data);
  Tensor x = empty(shape, {DType::u8, cpu});
  const std::size_t got = in.read(x.data(), static_cast<std::size_t>(elements));
  MT_CHECK(FormatError, got == static_cast<std::size_t>(elements), kOp, ": ", path, ": offset ", in.offset(),
           ": found ", got, " bytes of data, expected ", elements, " as the header claims: truncated");
  in.expect_end(header + elements);
  return x;
}

namespace {

std::string find_fashion_mnist(const std::string& directory, const std::string& file) {
  for (const char* suffix : {".gz", ""}) {
    std::string path = directory + "/" + file + suffix;
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0) return path;
  }
  MT_THROW(IoError, "load_fashion_mnist: no ", file, ".gz in ", directory, "; to get the files: ", kFashionMnistInstall,
           " (they go to ", kFashionMnistDirectory, ")");
}

}  // namespace

ImageDataset load_fashion_mnist(Split split, const std::string& directory) {
  const std::string prefix = split == Split::train ? "train" : "t10k";
  const std::string images = find_fashion_mnist(directory, prefix + "-images-idx3-ubyte");
  const std::string labels = find_fashion_mnist(directory, prefix + "-labels-idx1-ubyte");
  const ImageDataset data{read_idx(images), read_idx(labels), static_cast<int>(kFashionMnistClasses.size())};
  const Shape& x = data.images.shape();
  const Shape& y = data.labels.shape();
  MT_CHECK(FormatError, x.rank() == 3 && x[1] == 28 && x[2] == 28, "load_fashion_mnist: ", images,
           ": offset 4: found sizes ", x, ", expected [N,28,28]");
  MT_CHECK(FormatError, y.rank() == 1, "load_fashion_mnist: ", labels, ": offset 4: found sizes ", y, ", expected [N]");
  MT_CHECK(FormatError, x[0] == y[0], "load_fashion_mnist: ", labels, ": offset 4: found ", y[0], " labels, expected ",
           x[0], ", one for each image of ", images);
  const auto* label = data.labels.data<std::uint8_t>();
  for (std::int64_t i = 0; i < y[0]; ++i) {
    MT_CHECK(FormatError, label[i] < data.classes, "load_fashion_mnist: ", labels, ": offset ", 8 + i, ": found label ",
             int{label[i]}, ", expected 0 to ", data.classes - 1);
  }
  return data;
}

}  // namespace mantissa::train
