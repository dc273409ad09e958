# Install, exported CMake package and pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS pmoe pmoe_static EXPORT pmoeTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/pmoe" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT pmoeTargets NAMESPACE pmoe:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/pmoe)

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/pmoeConfig.cmake.in" "${PROJECT_BINARY_DIR}/pmoeConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/pmoe)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/pmoeConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/pmoeConfig.cmake" "${PROJECT_BINARY_DIR}/pmoeConfigVersion.cmake"
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/pmoe)

# The prefix is found from where the file lies, so that the installed tree can be moved or staged.
file(RELATIVE_PATH pmoe_pc_to_prefix "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" pmoe_pc_to_prefix "${pmoe_pc_to_prefix}")
cmake_path(APPEND pmoe_pc_libdir "\${prefix}" "${CMAKE_INSTALL_LIBDIR}")
cmake_path(APPEND pmoe_pc_includedir "\${prefix}" "${CMAKE_INSTALL_INCLUDEDIR}")
set(pmoe_pc_private ${pmoe_link_libraries})
list(TRANSFORM pmoe_pc_private REPLACE "^([^/-].*)$" "-l\\1")
list(JOIN pmoe_pc_private " " pmoe_pc_private)
configure_file("${PROJECT_SOURCE_DIR}/cmake/pmoe.pc.in" "${PROJECT_BINARY_DIR}/pmoe.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/pmoe.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR})
