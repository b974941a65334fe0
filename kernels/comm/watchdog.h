// Finds lost, hung and failed ranks: a thread on each rank, and the agreement on one error for all.
//
// Each rank tells rank 0 once a second or more often that it lives, and within 50 ms when its main
// thread comes to another phase. Rank 0 ends the job when
//   - a connection breaks: the rank is lost; found within milliseconds, whatever the limit
//   - nothing is heard of a rank for as long as comm_heartbeat allows: silent (stopped, or its
//     machine is gone)
//   - ranks have waited in a collective for that long, and a rank that has not entered it has made
//     no progress for as long: stuck. So is one inside a collective that polls and whose main
//     thread no longer does. Progress is a phase, a collective, comm_progress. In set-up ten times
//     the limit.
//   - all wait in the same collective for that long
// and the others do when rank 0 is lost or silent. Ranks that are all equally slow are never stuck.
//
// A rank that fails reports it to rank 0, which prints one error for all; then all leave with that
// code. For this, standard error is held back: on rank 0 for a moment, on the others until the end.
#ifndef UNPAD_WATCHDOG_H
#define UNPAD_WATCHDOG_H

#define RANKS_RESUME \
    "the newest checkpoint is whole: start again with --resume (scripts/train_until_done.sh does)"

enum { RANKS_END_MS = 10000 };  // for the others to end this process before it does so itself

// After ranks_meet. NULL, or one line that says what is missing.
const char *watchdog_start(void);

// Rank 0, when all are done: connections that end from now on are not lost ranks.
void watchdog_bye(void);
void watchdog_stop(void);

#endif
