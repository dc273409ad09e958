/* Messages between two ranks, for pipeline stages and checkpoints. Sending never waits: what is sent is copied, and
 * kept until it is received. Messages of one sender and tag are received in the order of sending. */
#ifndef LM_MAIL_H
#define LM_MAIL_H
#include <stddef.h>

/* A post office serves the ranks of this process; nranks of them if they are threads. */
struct lm_mail;
struct lm_mail *mail_create(int nranks);
/* Waits until what this process has sent is received. */
void mail_destroy(struct lm_mail *mail);

void mail_send(struct lm_mail *mail, int from, int to, int tag, const void *data, size_t bytes);
void mail_receive(struct lm_mail *mail, int from, int to, int tag, void *data, size_t bytes);

#endif
