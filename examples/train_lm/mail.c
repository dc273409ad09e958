#include "mail.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "ranks.h"

/* ---- between threads: a box for each receiver ---- */

struct letter {
  struct letter *next;
  int from, tag;
  size_t bytes;
  char data[];
};

struct box {
  pthread_mutex_t mutex;
  pthread_cond_t arrived;
  struct letter *first, **end;
};

static void boxes_open(struct box *box, int count) {
  for (int i = 0; i < count; i++) {
    pthread_mutex_init(&box[i].mutex, NULL);
    pthread_cond_init(&box[i].arrived, NULL);
    box[i].end = &box[i].first;
  }
}

static void boxes_close(struct box *box, int count) {
  for (int i = 0; i < count; i++) {
    pthread_cond_destroy(&box[i].arrived);
    pthread_mutex_destroy(&box[i].mutex);
  }
}

static void put(struct box *box, int from, int tag, const void *data, size_t bytes) {
  struct letter *letter = lm_alloc(sizeof *letter + bytes, 1);
  letter->from = from, letter->tag = tag, letter->bytes = bytes;
  memcpy(letter->data, data, bytes);
  pthread_mutex_lock(&box->mutex);
  *box->end = letter;
  box->end = &letter->next;
  pthread_cond_signal(&box->arrived); /* a box has one reader */
  pthread_mutex_unlock(&box->mutex);
}

static struct letter *take(struct box *box, int from, int tag) {
  pthread_mutex_lock(&box->mutex);
  struct letter **at = &box->first;
  for (;;) {
    while (*at && ((*at)->from != from || (*at)->tag != tag)) at = &(*at)->next;
    if (*at) break;
    pthread_cond_wait(&box->arrived, &box->mutex);
    at = &box->first;
  }
  struct letter *letter = *at;
  *at = letter->next;
  if (!*at) box->end = at;
  pthread_mutex_unlock(&box->mutex);
  return letter;
}

/* ---- between processes ---- */

#ifdef LM_WITH_MPI
#include <mpi.h>
#include <time.h>

enum { MOST_BYTES = 1 << 30 }; /* of one MPI message */

/* What is on its way, the oldest first. */
struct sent {
  struct sent *next;
  MPI_Request request;
  char data[];
};

struct post {
  MPI_Comm comm;
  struct sent *first, **end;
};

static void post_open(struct post *post) {
  MPI_Comm_dup(MPI_COMM_WORLD, &post->comm);
  post->end = &post->first;
}

static void rest(int tries) {
  struct timespec moment = {.tv_nsec = 20000};
  if (tries > 200) nanosleep(&moment, NULL);
}

/* Drops what has arrived; waits for all if asked to. */
static void tidy(struct post *post, int all) {
  for (int tries = 0; post->first;) {
    int done = 0;
    MPI_Test(&post->first->request, &done, MPI_STATUS_IGNORE);
    if (!done && !all) return;
    if (!done) rest(tries++);
    if (!done) continue;
    struct sent *gone = post->first;
    post->first = gone->next;
    free(gone);
  }
  post->end = &post->first;
}

static void post_close(struct post *post) {
  tidy(post, 1);
  MPI_Comm_free(&post->comm);
}

static void post_send(struct post *post, int to, int tag, const char *data, size_t bytes) {
  tidy(post, 0);
  do {
    size_t piece = bytes < MOST_BYTES ? bytes : MOST_BYTES;
    struct sent *sent = lm_alloc(sizeof *sent + piece, 1);
    memcpy(sent->data, data, piece);
    MPI_Isend(sent->data, (int)piece, MPI_BYTE, to, tag, post->comm, &sent->request);
    *post->end = sent;
    post->end = &sent->next;
    data += piece, bytes -= piece;
  } while (bytes > 0);
}

static void post_receive(struct post *post, int from, int tag, char *data, size_t bytes) {
  do {
    size_t piece = bytes < MOST_BYTES ? bytes : MOST_BYTES;
    MPI_Request request;
    MPI_Irecv(data, (int)piece, MPI_BYTE, from, tag, post->comm, &request);
    for (int done = 0, tries = 0; !done; tries++) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (!done) rest(tries);
    }
    data += piece, bytes -= piece;
  } while (bytes > 0);
}

#else

struct post {
  int unused;
};
static void post_open(struct post *post) { (void)post; }
static void post_close(struct post *post) { (void)post; }
static void post_send(struct post *post, int to, int tag, const char *data, size_t bytes) {
  (void)post, (void)to, (void)tag, (void)data, (void)bytes;
}
static void post_receive(struct post *post, int from, int tag, char *data, size_t bytes) {
  (void)post, (void)from, (void)tag, (void)data, (void)bytes;
}

#endif

/* ---- either ---- */

struct lm_mail {
  int processes, boxes;
  struct post post;
  struct box box[];
};

struct lm_mail *mail_create(int nranks) {
  int processes = ranks_are_processes(), boxes = processes ? 0 : nranks;
  struct lm_mail *mail = lm_alloc(sizeof *mail + (size_t)boxes * sizeof mail->box[0], 1);
  mail->processes = processes, mail->boxes = boxes;
  if (processes) post_open(&mail->post);
  boxes_open(mail->box, boxes);
  return mail;
}

void mail_destroy(struct lm_mail *mail) {
  if (mail->processes) post_close(&mail->post);
  boxes_close(mail->box, mail->boxes);
  free(mail);
}

void mail_send(struct lm_mail *mail, int from, int to, int tag, const void *data, size_t bytes) {
  if (mail->processes) post_send(&mail->post, to, tag, data, bytes);
  else put(&mail->box[to], from, tag, data, bytes);
}

void mail_receive(struct lm_mail *mail, int from, int to, int tag, void *data, size_t bytes) {
  if (mail->processes) {
    post_receive(&mail->post, from, tag, data, bytes);
    return;
  }
  struct letter *letter = take(&mail->box[to], from, tag);
  if (letter->bytes != bytes)
    lm_fatal("rank %d: %zu bytes came from rank %d; %zu were expected", to, letter->bytes, from, bytes);
  memcpy(data, letter->data, bytes);
  free(letter);
}
