/* Every setting of a run: what it is called on the command line and in a file, and what it may be. */
#ifndef LM_CONFIG_H
#define LM_CONFIG_H
#include <pmoe/pmoe.h>

#include "error.h"

enum { LM_MAX_LAYERS = 64, LM_MAX_PATH = 1024, LM_CONFIG_TEXT = 16384 };

/* "4" or "0,4,0,8"; 0 values: not given. */
struct lm_list {
  int count;
  int value[LM_MAX_LAYERS];
};

enum lm_schedule { LM_1F1B, LM_INTERLEAVED, LM_GPIPE };

struct lm_config {
  /* model */
  int layers, hidden, heads, context;
  int inner;              /* of every MLP and expert; 0: 4 hidden */
  int vocab;              /* 0: 256 for text, 50257 for token files */
  struct lm_list experts; /* per layer, 0: dense MLP; one value stands for all layers */
  struct lm_list ep;      /* per layer, 0: auto; one value stands for all layers */
  int topk;
  float capacity;    /* capacity factor, 0: dropless */
  pmoe_mix residual; /* of MoE layers */
  pmoe_dtype dtype;  /* of MLPs and experts; the rest is float32 */
  float aux, z;      /* coefficients of the router's losses */
  uint64_t seed;
  /* training */
  int steps, batch, micro; /* sequences in a step, over all ranks; in a micro-batch */
  float lr, weight_decay, clip;
  int warmup;
  int eval_every, eval_sequences;
  /* layout; what the sizes leave over is data parallel */
  int tp, cp, pp, etp;
  int sp; /* 1: the ranks of a TP group share out the tokens between matrix products */
  enum lm_schedule schedule;
  struct lm_list stages; /* layers of each virtual stage; none: cut by cost */
  /* run */
  char preset[32];
  char data[LM_MAX_PATH];   /* text file, folder of text, or token file */
  char out[LM_MAX_PATH];    /* folder of metrics and plots */
  int overwrite;            /* 1: even if another run has left its own there */
  char save[LM_MAX_PATH];   /* folder of the checkpoint; empty: out */
  char resume[LM_MAX_PATH]; /* checkpoint, or a folder with one; empty: start anew */
  int save_every;           /* 0: in the end, or when interrupted */
  int ranks;                /* 0: as many as mpirun started, or one */
  int threads;              /* of a rank, 0: an equal share of the cores */
  int sample;               /* tokens to generate in the end */
  int gemm_floor;
};

/* The defaults, which are the preset "demo". */
void config_init(struct lm_config *cfg);

/* Sets one setting by its name. Each returns 0, or -1 with a sentence in err. */
int config_set(struct lm_config *cfg, const char *key, const char *value, struct lm_error *err);
/* What the preset of that name says; "": nothing. */
int config_set_preset(struct lm_config *cfg, const char *name, struct lm_error *err);
/* "key = value" lines, each key once; # starts a comment. `origin` names the text in errors. */
int config_set_text(struct lm_config *cfg, const char *text, const char *origin, struct lm_error *err);
int config_set_file(struct lm_config *cfg, const char *path, struct lm_error *err);

/* Whether the settings go together on this many ranks. Spreads lists of one value over the layers, and cuts the layers
 * into stages unless that is set. */
int config_check(struct lm_config *cfg, int nranks, struct lm_error *err);

/* The settings of the model and its training (not those of one run: paths, layout, threads) as text that
 * config_set_text reads. */
void config_write(const struct lm_config *cfg, char text[LM_CONFIG_TEXT]);
/* "0,4,0,8"; returns its length. */
int config_write_list(const struct lm_list *list, char *to, size_t room);

/* For a run that goes on from a checkpoint with the settings `saved`, both checked: -1 if the model is another, else
 * the changes, a line for each. */
int config_compare(const struct lm_config *cfg, const struct lm_config *saved, char changes[LM_CONFIG_TEXT],
                   struct lm_error *err);

/* The expert-parallel size of a layer: as set, or the largest that the ranks of a stage and the layer's experts allow.
 */
int config_layer_ep(const struct lm_config *cfg, int layer, int nranks);
int config_inner(const struct lm_config *cfg);

/* Setting `index` as the command line shows it; 0 past the last one. */
struct lm_setting_help {
  const char *name, *argument, *help;
};
int config_setting(int index, struct lm_setting_help *out);

#endif
