# The library: shared (pmoe) and static (pmoe_static) from the same objects.
file(GLOB pmoe_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/core/*.c" "${PROJECT_SOURCE_DIR}/gating/*.c"
  "${PROJECT_SOURCE_DIR}/a2a/*.c" "${PROJECT_SOURCE_DIR}/moe/*.c")
if(NOT PMOE_ONEDNN_FOUND)
  list(FILTER pmoe_sources EXCLUDE REGEX "gemm_onednn\\.c$")
endif()
if(NOT PMOE_CBLAS_FOUND)
  list(FILTER pmoe_sources EXCLUDE REGEX "gemm_cblas\\.c$")
endif()
if(NOT MPI_C_FOUND)
  list(FILTER pmoe_sources EXCLUDE REGEX "transport_mpi\\.c$")
endif()

if(PMOE_POISON)
  list(APPEND pmoe_definitions PMOEI_POISON)
endif()

add_library(pmoe_objects OBJECT ${pmoe_sources})
target_compile_definitions(pmoe_objects PRIVATE ${pmoe_definitions} _POSIX_C_SOURCE=200809L)
# No file relies on the order of float operations being left alone except where it says so; contraction to FMA is welcome.
target_compile_options(pmoe_objects PRIVATE -ffp-contract=fast -fno-math-errno -fno-trapping-math ${pmoe_openmp_flags})
target_include_directories(pmoe_objects PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include")
target_include_directories(pmoe_objects SYSTEM PRIVATE ${pmoe_include_directories})
target_link_libraries(pmoe_objects PRIVATE pmoe_warnings)

add_library(pmoe SHARED)
add_library(pmoe_static STATIC)
foreach(target pmoe pmoe_static)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:pmoe_objects>)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PRIVATE ${pmoe_link_libraries})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME pmoe LINKER_LANGUAGE C)
endforeach()
set_target_properties(pmoe PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} INSTALL_RPATH_USE_LINK_PATH ON)
target_link_options(pmoe PRIVATE "-Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/pmoe.map")
set_target_properties(pmoe PROPERTIES LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/pmoe.map")
add_library(pmoe::pmoe ALIAS pmoe)
add_library(pmoe::pmoe_static ALIAS pmoe_static)
