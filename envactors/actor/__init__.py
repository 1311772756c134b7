"""Actors: the parent's half of a worker process, and the handles and futures that users get.

The way of a call and of its reply:

    caller    handle ── Actor.accept ── JobQueue ── Call.start                       ActorFuture.result
                                                        │ frame                              ▲ outcome
    loop                                                │      Actor.on_frame ── JobQueue ── Call.on_reply
                                                        ▼            ▲ frame
    worker                                              runs one job at a time

In the queue, a call waits until the worker is free. So a reply, a deadline, or an exit belongs to the one job that is
running; an idle or starting process has none. A thread that waits for a result may borrow the channel and do the work
of the loop (`loan`). When the process exits, `Actor.finish_process` decides about the running job and about the next
process.

Begin to read with the events at the top of `actor`, then `job`, `job_queue`, and the table of phases in `actor`.

An actor is seen as:

    JobActor        by its queue and its jobs (`job`)
    StartingActor   by its starter (`starter`)
    WorkerEvents    by its worker, which reports frames and its exit (`envactors.backends.base`)
    Owner           by futures (`future`); a pool is one, too
    Member          by the runtime, which closes it at the exit of the program (`envactors.runtime`)
    Changeable      by its lock, which repairs it (`change`)
    PermitHolder    by the permits, which wake it (`permits`)

For users:
    spawn           Makes actors, for users and for pools and vectors
    handle          Handles, whose methods return futures
    future          The future of a call, and the outcome that a thread reads when it asks
    states          States and statistics, and phases

An actor with processes:
    base            The interface of all actors
    config          Its settings
    change          Its lock, and the rule about changes that an exception interrupts
    actor           One process after another: requests, frames, deadlines, exits
    starter         The start of a process: launches, and processes taken from standbys
    actor_process   One process, why it ends, and whether another one follows
    tenant          The record of the envs in the process, for vectors
    loan            Lends the channel to a waiting thread
    timers          Its timers, and the watch over deadlines
    spinning        When callers and workers spin before they sleep

Its jobs:
    job             The interface of jobs, and those that end a process
    calls           Calls, and replays of journals
    job_queue       Their order, from the queue to the worker and to their ends
    permits         How many actors may step at a time (``max_running``)

An actor without a process:
    inline          Runs env code in the thread of the caller
    request_stack   Which env code runs in which thread

Errors, messages, and records of events:
    error_factory   Makes errors
    evidence        Stacks and tracebacks, with the frames of users first
    log             Log messages
    recording       The recorder of spans and exits, for traces

    latch, type_variables   Small helpers
"""
