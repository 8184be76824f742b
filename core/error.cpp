#include "core/error.h"

#include <charconv>

namespace mantissa::detail {

std::string number_to_string(double x) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return std::string(text, end);
}

std::string with_location(std::string text, const char* file, int line) {
  text += "  [";
  text += file;
  text += ':';
  text += std::to_string(line);
  text += ']';
  return text;
}

}  // namespace mantissa::detail
