# The CUDA back end: C files that call the run time, and .cu files that nvcc compiles. What is here serves the library itself
# (PMOE_CUDA=ON) and the one that the tests run without a GPU.
find_program(PMOE_NVCC nvcc HINTS ENV CUDA_PATH PATHS /usr/local/cuda/bin)
file(GLOB pmoe_cuda_c_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/core/*cuda.c" "${PROJECT_SOURCE_DIR}/gating/*_cuda.c"
  "${PROJECT_SOURCE_DIR}/a2a/*_cuda.c" "${PROJECT_SOURCE_DIR}/a2a/*_nccl.c" "${PROJECT_SOURCE_DIR}/moe/*_cuda.c")
file(GLOB pmoe_cuda_cu_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/core/*.cu" "${PROJECT_SOURCE_DIR}/gating/*.cu"
  "${PROJECT_SOURCE_DIR}/a2a/*.cu" "${PROJECT_SOURCE_DIR}/moe/*.cu")
if(PMOE_NVCC)
  file(REAL_PATH "${PMOE_NVCC}" pmoe_cuda_root)
  cmake_path(GET pmoe_cuda_root PARENT_PATH pmoe_cuda_root)
  cmake_path(GET pmoe_cuda_root PARENT_PATH pmoe_cuda_root)
  find_path(PMOE_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS "${pmoe_cuda_root}/include" "${pmoe_cuda_root}/targets/x86_64-linux/include")
endif()

# Objects of all .cu files: pmoe_compile_cu(<variable for the list> <folder of the objects> <nvcc options>...)
function(pmoe_compile_cu objects folder)
  set(list)
  set(directory "${CMAKE_CURRENT_BINARY_DIR}/${folder}")
  file(MAKE_DIRECTORY "${directory}")
  foreach(source ${pmoe_cuda_cu_sources})
    get_filename_component(name "${source}" NAME_WE)
    set(object "${directory}/${name}.o")
    add_custom_command(OUTPUT "${object}"
      COMMAND "${PMOE_NVCC}" -std=c++17 -O3 -lineinfo -Xcompiler=-fPIC,-fvisibility=hidden "-I${PROJECT_SOURCE_DIR}"
              "-I${PROJECT_SOURCE_DIR}/include" ${ARGN} -MD -MF "${object}.d" -c "${source}" -o "${object}"
      DEPENDS "${source}" DEPFILE "${object}.d" VERBATIM COMMENT "nvcc ${folder}/${name}")
    list(APPEND list "${object}")
  endforeach()
  set(${objects} ${list} PARENT_SCOPE)
endfunction()

set(PMOE_NCCL_FOUND FALSE)
if(PMOE_CUDA)
  if(NOT PMOE_NVCC OR NOT PMOE_CUDA_INCLUDE_DIR)
    message(FATAL_ERROR "pmoe: PMOE_CUDA=ON, but nvcc or cuda_runtime_api.h was not found")
  endif()
  set(hints "${pmoe_cuda_root}/lib64" "${pmoe_cuda_root}/targets/x86_64-linux/lib")
  find_library(PMOE_CUDART_LIBRARY cudart HINTS ${hints} REQUIRED)
  find_library(PMOE_CUBLAS_LIBRARY cublas HINTS ${hints} REQUIRED)
  # What nvcc emits for the host calls a little of the C++ run time.
  list(APPEND pmoe_link_libraries "${PMOE_CUBLAS_LIBRARY}" "${PMOE_CUDART_LIBRARY}" stdc++)
  list(APPEND pmoe_include_directories "${PMOE_CUDA_INCLUDE_DIR}")
  list(APPEND pmoe_definitions PMOE_WITH_CUDA)
  if(PMOE_NCCL)
    find_path(PMOE_NCCL_INCLUDE_DIR nccl.h HINTS "${PMOE_CUDA_INCLUDE_DIR}")
    find_library(PMOE_NCCL_LIBRARY nccl HINTS ${hints})
    if(PMOE_NCCL_INCLUDE_DIR AND PMOE_NCCL_LIBRARY)
      set(PMOE_NCCL_FOUND TRUE)
      list(APPEND pmoe_link_libraries "${PMOE_NCCL_LIBRARY}")
      list(APPEND pmoe_include_directories "${PMOE_NCCL_INCLUDE_DIR}")
      list(APPEND pmoe_definitions PMOE_WITH_NCCL)
    endif()
  endif()
  pmoe_report(PMOE_NCCL "${PMOE_NCCL_FOUND}" "NCCL")
  list(REMOVE_DUPLICATES pmoe_include_directories)
  # A kernel whose registers spill does not build.
  pmoe_compile_cu(pmoe_cuda_objects cuda -Xptxas=--warn-on-spills,--warning-as-error
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 "-gencode=arch=compute_100,code=[sm_100,compute_100]")
endif()
