#include "ptx.h"

namespace ptxvm {

namespace {

struct TypeInfo {
  const char *name;
  Type type;
  int size;
};
const TypeInfo kTypes[] = {
    {"pred", Type::Pred, 1}, {"b8", Type::B8, 1},         {"b16", Type::B16, 2},       {"b32", Type::B32, 4},
    {"b64", Type::B64, 8},   {"b128", Type::B128, 16},    {"u8", Type::U8, 1},         {"u16", Type::U16, 2},
    {"u32", Type::U32, 4},   {"u64", Type::U64, 8},       {"s8", Type::S8, 1},         {"s16", Type::S16, 2},
    {"s32", Type::S32, 4},   {"s64", Type::S64, 8},       {"f16", Type::F16, 2},       {"f16x2", Type::F16x2, 4},
    {"bf16", Type::BF16, 2}, {"bf16x2", Type::BF16x2, 4}, {"tf32", Type::TF32, 4},     {"f32", Type::F32, 4},
    {"f64", Type::F64, 8},   {"e4m3x2", Type::E4M3x2, 2}, {"e5m2x2", Type::E5M2x2, 2},
};

} // namespace

Type type_named(const std::string &name) {
  for (const TypeInfo &info : kTypes)
    if (name == info.name) return info.type;
  return Type::None;
}

int size_of(Type type) {
  for (const TypeInfo &info : kTypes)
    if (type == info.type) return info.size;
  return 0;
}

bool is_signed(Type type) { return type == Type::S8 || type == Type::S16 || type == Type::S32 || type == Type::S64; }

bool is_float(Type type) { return type == Type::F16 || type == Type::BF16 || type == Type::F32 || type == Type::F64; }

const std::vector<std::string> &special_register_names() {
  static const auto &names = *new std::vector<std::string>{
      "%tid.x",           "%tid.y",       "%tid.z",       "%ntid.x",       "%ntid.y",          "%ntid.z",
      "%ctaid.x",         "%ctaid.y",     "%ctaid.z",     "%nctaid.x",     "%nctaid.y",        "%nctaid.z",
      "%laneid",          "%warpid",      "%nwarpid",     "%lanemask_eq",  "%lanemask_lt",     "%lanemask_le",
      "%lanemask_gt",     "%lanemask_ge", "%smid",        "%nsmid",        "%gridid",          "%dynamic_smem_size",
      "%total_smem_size", "WARP_SZ",      "%clusterid.x", "%nclusterid.x", "%cluster_ctarank", "%cluster_nctarank",
      "%clock",           "%clock64",     "%globaltimer", "%clock_hi",     "%envreg1",         "%envreg2",
  };
  return names;
}

std::vector<std::string> split_dots(const std::string &text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t dot; (dot = text.find('.', begin)) != std::string::npos; begin = dot + 1)
    parts.push_back(text.substr(begin, dot - begin));
  parts.push_back(text.substr(begin));
  return parts;
}

} // namespace ptxvm
