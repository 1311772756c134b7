"""Vector envs: many envs in actors, stepped as one through shared memory.

The journey of one request. Each env has a *row*, which is its part of the shared memory. On the left is the status of
the env in `EnvTable`, on the right the class that acts:

    IDLE       the user calls `VectorEnv.step`: are the arguments valid, and the envs idle?      RowEngine
      │        if the actor is not free, queue the env there; otherwise, skip QUEUED             EnvGroup, QueuedRows
      ▼
    QUEUED     the env waits until its actor is free
      │        write the request into the row, ring the worker, and watch it                     EnvTable, RowsJob
      ▼
    POSTED     the worker runs the env, and writes the result into the row                       worker.env_rows
      │        meanwhile the caller sleeps on doorbells                                          ResultWaiters
      │        the row is *complete*: copy all rows at once, which makes the envs IDLE ...       RowEngine, RowReader
      ▼        ... or, if anything is out of the ordinary, collect the results one by one        EnvGroup
    DONE       the result, or the error of a request that has FAILED, waits for the user
      │        deliver it; the result becomes the last one of the env                            RowEngine, LastRows
      ▼
    IDLE

The way of a failure. The env raises, its process ends, or its result cannot be unpickled:

    a *loss* says why the request has no result                                                  EnvRecovery
      ▼
    its *fate* is decided                                                                        fates
      ▼
    FAIL, REPORT   the error is the outcome                                                      EnvRecovery
    TRUNCATE       the outcome is the last result, truncated, with the error in its info
    RESET          the request becomes a reset in the next process, which completes the answer   ResetAnswer
    REDO           the request is queued again; under "replay", journals are replayed before it  EnvRecovery, Journals

Begin with `fates` for failures, and with `table` and `engine` for everything else.

Where each fact about an env is, who changes it, and who reads it (methods without a class are those of `EnvTable`):

    the fact                      where                                    changed by                     read by
    a request is made             EnvTable.status is not IDLE              mark_queued, write_requests    check_idle
      which one                   EnvTable.requests; bare steps have none  set_requests                   EnvRecovery
    it is queued                  EnvTable.status is QUEUED                mark_queued, end_process       QueuedRows
      in which job                RowsJob.queued_in                        QueuedRows                     QueuedRows
    it is posted                  EnvTable.status is POSTED                write_requests                 RowsJob
      as what, to which process   Rows.ops, posted_ids, posted_incarnations write_requests, mark_queued,   RowReader
                                                                           rollouts
    its row is written            written_ids and posted_ids are equal     the worker, end_process,       ResultWaiters
                                                                           rollouts
      and complete, still POSTED  Rows.is_complete: overflow, overdue      add_overflow, miss_deadline    has_outcome
    it has an outcome             EnvTable.status is DONE or FAILED        record_outcome                 RowEngine
      which one                   EnvTable.outcomes, or else in the row    record_outcome                 RowEngine
      when it came                Slab.when                                record_outcome, the worker     RowEngine
    the last result               LastRows.ops, incarnations, contents     methods of LastRows            RowReader
    the state of the episode      Episodes.flags                           methods of Episodes            EnvTable
      the next step is a reset    Episodes.awaits_autoreset                methods of Episodes            write_requests
      its resets have failed      Episodes.failed_resets                   methods of Episodes            Episodes
    the process of the actor      ActorProcess.incarnation                 the actor                      everyone
      as the rows know it         Rows.incarnations                        begin_process                  Rows.post

The engines, which `VectorEnv` calls:
    base            Interface of the two engines, and the methods that they share
    engine          The engine of envs in workers: checks, posts, waits, and delivers
    inline          The engine of in-process envs, and `inline_results`, their last results
    build           Launches actors, and builds the engine of workers

The state of the envs in workers, which changes only under the lock of the vector:
    table           The request, the status, and the outcome of each env; the transitions
    rows            The last post of each row, and the result that has come back
    last_rows       The last result of each env, which users may get again
    episodes        Where each env is in its episode, its flags, seeds, and counts; in all kinds of vectors
    journals        The inputs since the last seeded reset, for replays and crash bundles (`envactors.replay`)
    requests        Requests that are more than a bare step, and results that were copied out of rows

The envs of one actor:
    env_group       The tenant of the actor: queues requests, collects results, and follows processes
    row_jobs        Its jobs: rows that wait, and rows that run
    env_recovery    Resolves requests without results, or has them run again, after replays
    fates           Losses, and the decision about them
    recycling       When a process is replaced between two episodes

Results, waiting, and the rest:
    waiting         Threads that sleep until results are there
    row_reader      Copies results out of rows, and unpickles them
    batching        Makes a batch of single results
    results         `EnvStep`, `Batch`, and `EnvSnapshot`, as users get them, and the infos of failures
    selection       Some envs of a vector
    timing          How long steps and resets take
    options         The options of vectors
    inputs          Checks of arguments and options
"""
