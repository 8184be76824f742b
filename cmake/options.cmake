# Compile options that every target of this project shares, as an interface target.
add_library(mantissa_options INTERFACE)
set(cxx $<COMPILE_LANGUAGE:CXX>)
target_compile_options(mantissa_options INTERFACE
  $<${cxx}:-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion>
  # Floating point stays IEEE (no -ffast-math: it deletes isfinite); these two only allow vectorised maths.
  $<${cxx}:-fno-math-errno -fno-trapping-math>
  $<${cxx}:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>)
if(MANTISSA_CPU_ARCH)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=${MANTISSA_CPU_ARCH} MANTISSA_HAS_CPU_ARCH)
  if(MANTISSA_HAS_CPU_ARCH)
    target_compile_options(mantissa_options INTERFACE $<${cxx}:-march=${MANTISSA_CPU_ARCH}>)
  endif()
endif()
if(MANTISSA_WERROR)
  target_compile_options(mantissa_options INTERFACE $<${cxx}:-Werror>)
endif()
if(MANTISSA_SANITIZE)
  target_compile_options(mantissa_options INTERFACE $<${cxx}:-fsanitize=${MANTISSA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(mantissa_options INTERFACE -fsanitize=${MANTISSA_SANITIZE})
endif()
find_program(MANTISSA_CCACHE ccache)
if(MANTISSA_CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MANTISSA_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${MANTISSA_CCACHE})
endif()
