# The header-only cuDNN frontend, from an installation or from its PyPI wheel unpacked into .deps/ by scripts/setup.sh.
find_path(CudnnFrontend_INCLUDE_DIR cudnn_frontend.h
          HINTS ${CUDNN_FRONTEND_ROOT} $ENV{CUDNN_FRONTEND_ROOT} ${PROJECT_SOURCE_DIR}/.deps/cudnn_frontend PATH_SUFFIXES include)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudnnFrontend REQUIRED_VARS CudnnFrontend_INCLUDE_DIR)
if(CudnnFrontend_FOUND AND NOT TARGET CudnnFrontend::headers)
  add_library(CudnnFrontend::headers INTERFACE IMPORTED)
  set_target_properties(CudnnFrontend::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${CudnnFrontend_INCLUDE_DIR})
endif()
