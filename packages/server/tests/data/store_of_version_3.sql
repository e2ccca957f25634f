BEGIN TRANSACTION;
CREATE TABLE advantages (
	attempt_pk INTEGER NOT NULL, 
	idx INTEGER NOT NULL, 
	data BLOB, 
	PRIMARY KEY (attempt_pk, idx), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
)
 WITHOUT ROWID

;
INSERT INTO "advantages" VALUES(1,0,X'740000003F0000803E');
INSERT INTO "advantages" VALUES(1,1,NULL);
CREATE TABLE attempts (
	pk INTEGER NOT NULL, 
	rollout_pk INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	worker_id TEXT NOT NULL, 
	key_digest BLOB NOT NULL, 
	expires_at FLOAT NOT NULL, 
	started_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	outcome VARCHAR(20), 
	output BLOB, 
	error BLOB, 
	duration_s FLOAT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (rollout_pk, number), 
	FOREIGN KEY(rollout_pk) REFERENCES rollouts (pk)
);
INSERT INTO "attempts" VALUES(1,1,1,'w1',X'A992132B8BA27C10640F6635F8AA3DF9',1.79535135731193161009e+09,1.79535129731200027462e+09,1.79535129735165643687e+09,'succeeded',X'707B2273716C223A2253454C4543542031227D',NULL,0.0);
INSERT INTO "attempts" VALUES(2,2,1,'w1',X'B183D19F64ADB5BCCB711740D0043370',1.79535135735980486866e+09,1.79535129735987353328e+09,1.79535129737570786469e+09,'succeeded',X'70226C61746522',NULL,0.0);
CREATE TABLE calls (
	pk INTEGER NOT NULL, 
	attempt_pk INTEGER NOT NULL, 
	idx INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	call_key TEXT NOT NULL, 
	parent INTEGER, 
	policy INTEGER NOT NULL, 
	policy_version INTEGER NOT NULL, 
	suffix BLOB NOT NULL, 
	completion BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	finish_reason VARCHAR(10) NOT NULL, 
	sampling INTEGER NOT NULL, 
	seed TEXT, 
	agent INTEGER, 
	span_id BLOB, 
	is_break BOOLEAN NOT NULL, 
	tool_call_ids TEXT, 
	trainable BOOLEAN NOT NULL, 
	started_at FLOAT NOT NULL, 
	duration_s FLOAT NOT NULL, 
	history_key TEXT, 
	PRIMARY KEY (pk), 
	UNIQUE (attempt_pk, idx), 
	UNIQUE (attempt_pk, call_key), 
	CHECK (parent IS NULL OR parent < idx), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
);
INSERT INTO "calls" VALUES(1,1,0,'c0','key-c0',NULL,1,3,X'03010000020000701101',X'0203000400',X'ABAAAABE000080BE','stop',3,'7',2,NULL,0,NULL,1,0.0,0.0,NULL);
INSERT INTO "calls" VALUES(2,1,1,'c1','key-c1',0,1,3,X'020500',X'020600',X'ABAA2ABE','stop',5,NULL,4,NULL,0,NULL,1,0.0,0.0,NULL);
INSERT INTO "calls" VALUES(3,2,0,'d0','key-d0',NULL,1,3,X'020100',X'020200',X'000000BF','stop',5,NULL,NULL,NULL,0,NULL,1,0.0,0.0,NULL);
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','3');
CREATE TABLE other_calls (
	pk INTEGER NOT NULL, 
	attempt_pk INTEGER NOT NULL, 
	kind VARCHAR(9) NOT NULL, 
	path TEXT NOT NULL, 
	model TEXT NOT NULL, 
	agent INTEGER, 
	status INTEGER, 
	code TEXT, 
	message BLOB, 
	request BLOB, 
	answer BLOB, 
	started_at FLOAT NOT NULL, 
	duration_s FLOAT NOT NULL, 
	PRIMARY KEY (pk), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
);
INSERT INTO "other_calls" VALUES(1,1,'elsewhere','api.example.com','',NULL,NULL,NULL,NULL,NULL,NULL,0.0,0.0);
CREATE TABLE rewards (
	attempt_pk INTEGER NOT NULL, 
	idx INTEGER NOT NULL, 
	name INTEGER NOT NULL, 
	value FLOAT, 
	PRIMARY KEY (attempt_pk, idx, name), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
)
 WITHOUT ROWID

;
INSERT INTO "rewards" VALUES(1,-1,6,0.5);
INSERT INTO "rewards" VALUES(1,-1,8,1.0);
INSERT INTO "rewards" VALUES(1,0,9,-0.1);
INSERT INTO "rewards" VALUES(1,1,7,1.0);
INSERT INTO "rewards" VALUES(1,1,9,NULL);
INSERT INTO "rewards" VALUES(2,-1,6,0.25);
CREATE TABLE rollouts (
	pk INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	task_pk INTEGER NOT NULL, 
	group_id TEXT NOT NULL, 
	mode VARCHAR(10) NOT NULL, 
	step INTEGER NOT NULL, 
	sampling TEXT, 
	max_attempts INTEGER NOT NULL, 
	timeout_s FLOAT NOT NULL, 
	state VARCHAR(9) NOT NULL, 
	outcome VARCHAR(20), 
	started INTEGER DEFAULT '0' NOT NULL, 
	forgiven INTEGER DEFAULT '0' NOT NULL, 
	deciding INTEGER, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (id), 
	FOREIGN KEY(task_pk) REFERENCES tasks (pk)
);
INSERT INTO "rollouts" VALUES(1,'a',1,'g','train',0,NULL,1,300.0,'succeeded','succeeded',1,0,1,1.79535129729249644282e+09);
INSERT INTO "rollouts" VALUES(2,'b',1,'g','train',0,NULL,1,300.0,'succeeded','succeeded',1,0,1,1.79535129729249644282e+09);
INSERT INTO "rollouts" VALUES(3,'c',1,'g','validation',0,NULL,1,300.0,'queued',NULL,0,0,NULL,1.79535129729249644282e+09);
CREATE TABLE scores (
	attempt_pk INTEGER NOT NULL, 
	reward FLOAT, 
	PRIMARY KEY (attempt_pk), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
);
INSERT INTO "scores" VALUES(1,1.0);
CREATE TABLE spans (
	attempt_pk INTEGER NOT NULL, 
	span BLOB NOT NULL, 
	parent BLOB, 
	agent INTEGER, 
	PRIMARY KEY (attempt_pk, span), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
)
 WITHOUT ROWID

;
CREATE TABLE steps (
	step INTEGER NOT NULL, 
	metrics TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (step)
);
INSERT INTO "steps" VALUES(1,'{"loss":0.25}',1.79535129738778591159e+09);
CREATE TABLE tasks (
	pk INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	task_id TEXT NOT NULL, 
	body BLOB NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (digest)
);
INSERT INTO "tasks" VALUES(1,X'98FD1010D0F67EEA1F2D05315C9BAE7A','t',X'707B226964223A2274222C22696E707574223A2236202A20373F222C22616E73776572223A34322C226D65746164617461223A7B7D7D');
CREATE TABLE tool_calls (
	pk INTEGER NOT NULL, 
	attempt_pk INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	name INTEGER NOT NULL, 
	arguments BLOB, 
	result BLOB, 
	status VARCHAR(17) NOT NULL, 
	duration_s FLOAT NOT NULL, 
	transition_id TEXT, 
	agent INTEGER, 
	error_type TEXT, 
	span BLOB, 
	parent_span BLOB, 
	started_at FLOAT NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (attempt_pk, span), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
);
CREATE TABLE trained (
	rollout_pk INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	PRIMARY KEY (rollout_pk), 
	FOREIGN KEY(rollout_pk) REFERENCES rollouts (pk), 
	FOREIGN KEY(step) REFERENCES steps (step)
);
INSERT INTO "trained" VALUES(1,1);
CREATE TABLE words (
	pk INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (text)
);
INSERT INTO "words" VALUES(1,'main');
INSERT INTO "words" VALUES(2,'planner');
INSERT INTO "words" VALUES(3,'{"temperature":0.5,"top_p":1.0,"top_k":0,"max_tokens":256,"stop_token_ids":[],"stop":[],"seed":null}');
INSERT INTO "words" VALUES(4,'write');
INSERT INTO "words" VALUES(5,'{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":256,"stop_token_ids":[],"stop":[],"seed":null}');
INSERT INTO "words" VALUES(6,'style');
INSERT INTO "words" VALUES(7,'turn');
INSERT INTO "words" VALUES(8,'match');
INSERT INTO "words" VALUES(9,'tools');
CREATE INDEX rollouts_queue ON rollouts (pk) WHERE state = 'queued';
CREATE INDEX rollouts_step ON rollouts (step);
CREATE INDEX attempts_running ON attempts (expires_at) WHERE outcome IS NULL;
CREATE INDEX trained_step ON trained (step);
CREATE INDEX tool_calls_attempt ON tool_calls (attempt_pk) WHERE span IS NULL;
CREATE INDEX ix_other_calls_attempt_pk ON other_calls (attempt_pk);
COMMIT;
