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
INSERT INTO "advantages" VALUES(1,0,X'630000003F');
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
	outcome TEXT, 
	output BLOB, 
	error BLOB, 
	duration_s FLOAT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (rollout_pk, number), 
	FOREIGN KEY(rollout_pk) REFERENCES rollouts (pk)
);
INSERT INTO "attempts" VALUES(1,1,1,'w1',X'BAF200E70A6BADC74F5B9B68774DA53A',1.79533860086781024926e+09,1.79533854086781024931e+09,1.79533854095177054406e+09,'succeeded',X'707B2273716C223A2253454C4543542031227D',NULL,1.5);
INSERT INTO "attempts" VALUES(2,2,1,'w1',X'A82291A6EB50733C33494727272748B2',1.79533860116387605668e+09,1.79533854116387605673e+09,1.79533854117611646654e+09,'agent_error',NULL,X'7A78010B4BCC294D752D2ACA2FB252C8CB57A81805448700002A3491FF',0.0);
CREATE TABLE calls (
	pk INTEGER NOT NULL, 
	attempt_pk INTEGER NOT NULL, 
	idx INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	call_key TEXT NOT NULL, 
	parent INTEGER, 
	policy INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	suffix BLOB NOT NULL, 
	completion BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	finish TEXT NOT NULL, 
	sampling INTEGER NOT NULL, 
	seed TEXT, 
	agent INTEGER, 
	span BLOB, 
	is_break SMALLINT NOT NULL, 
	tool_call_ids TEXT, 
	trainable SMALLINT NOT NULL, 
	started_at FLOAT NOT NULL, 
	duration_s FLOAT NOT NULL, 
	history_key TEXT, 
	PRIMARY KEY (pk), 
	UNIQUE (attempt_pk, idx), 
	UNIQUE (attempt_pk, call_key), 
	CHECK (parent IS NULL OR parent < idx), 
	FOREIGN KEY(attempt_pk) REFERENCES attempts (pk)
);
INSERT INTO "calls" VALUES(1,1,0,'c0','key-c0',NULL,1,3,X'03010000020000701101',X'0203000400',X'ABAAAABE000080BE','stop',2,'7',NULL,X'00000000000000AA',0,'["call_1"]',1,0.0,0.0,NULL);
INSERT INTO "calls" VALUES(2,1,1,'c1','key-c1',0,1,3,X'020500',X'020600',X'ABAA2ABE','length',3,NULL,4,NULL,1,NULL,0,12.5,0.25,'h');
CREATE TABLE meta (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','2');
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
INSERT INTO "rewards" VALUES(1,-1,9,0.5);
INSERT INTO "rewards" VALUES(1,-1,11,1.0);
INSERT INTO "rewards" VALUES(1,1,10,1.0);
CREATE TABLE rollouts (
	pk INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	task_pk INTEGER NOT NULL, 
	group_id TEXT NOT NULL, 
	mode TEXT NOT NULL, 
	step INTEGER NOT NULL, 
	sampling TEXT, 
	max_attempts INTEGER NOT NULL, 
	timeout_s FLOAT NOT NULL, 
	state TEXT NOT NULL, 
	outcome TEXT, 
	started INTEGER DEFAULT '0' NOT NULL, 
	forgiven INTEGER DEFAULT '0' NOT NULL, 
	deciding INTEGER, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (pk), 
	UNIQUE (id), 
	FOREIGN KEY(task_pk) REFERENCES tasks (pk)
);
INSERT INTO "rollouts" VALUES(1,'a',1,'g','train',0,'{"temperature":0.5,"top_p":1.0,"top_k":0,"max_tokens":256,"stop_token_ids":[],"stop":[],"seed":null}',1,300.0,'succeeded','succeeded',1,0,1,1.79533854083671212198e+09);
INSERT INTO "rollouts" VALUES(2,'b',1,'g','train',0,NULL,1,300.0,'failed','agent_error',1,0,1,1.79533854083671212198e+09);
INSERT INTO "rollouts" VALUES(3,'c',1,'g','validation',0,NULL,1,300.0,'queued',NULL,0,0,NULL,1.79533854083671212198e+09);
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
INSERT INTO "spans" VALUES(1,X'00000000000000AA',X'00000000000000BB',NULL);
INSERT INTO "spans" VALUES(1,X'00000000000000BB',NULL,8);
CREATE TABLE steps (
	step INTEGER NOT NULL, 
	metrics TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (step)
);
INSERT INTO "steps" VALUES(1,'{"loss":0.25}',1795338541.15188);
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
	status TEXT NOT NULL, 
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
INSERT INTO "tool_calls" VALUES(1,1,'call_1',5,X'707B7D',X'7A7801ABA81805C4860000B20A8CA1','ok',0.5,NULL,NULL,NULL,X'0000000000000001',X'00000000000000AA',2.0);
INSERT INTO "tool_calls" VALUES(2,1,'refused-1',6,X'707B2270617468223A20222F636861742F636F6D706C6574696F6E73222C2022706172616D223A2022746F6F6C73227D',X'707B22737461747573223A203530332C20226D657373616765223A20226E6F20656E67696E65227D','error',0.0,NULL,4,'engine_unavailable',NULL,NULL,3.0);
INSERT INTO "tool_calls" VALUES(3,1,'upstream-1',7,X'707B2270617468223A20222F636861742F636F6D706C6574696F6E73222C202272657175657374223A207B226D6F64656C223A20226770742D39227D7D',X'707B22737461747573223A203230302C2022616E73776572223A207B226964223A202278227D7D','ok',0.25,NULL,NULL,NULL,NULL,NULL,4.0);
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
INSERT INTO "words" VALUES(2,'{"temperature":0.5,"top_p":1.0,"top_k":0,"max_tokens":256,"stop_token_ids":[],"stop":[],"seed":null}');
INSERT INTO "words" VALUES(3,'{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":256,"stop_token_ids":[],"stop":[],"seed":null}');
INSERT INTO "words" VALUES(4,'write');
INSERT INTO "words" VALUES(5,'sql');
INSERT INTO "words" VALUES(6,'refused:chat/completions');
INSERT INTO "words" VALUES(7,'upstream:gpt-9');
INSERT INTO "words" VALUES(8,'planner');
INSERT INTO "words" VALUES(9,'style');
INSERT INTO "words" VALUES(10,'turn');
INSERT INTO "words" VALUES(11,'match');
CREATE INDEX rollouts_step ON rollouts (step);
CREATE INDEX rollouts_queue ON rollouts (pk) WHERE state = 'queued';
CREATE INDEX attempts_running ON attempts (expires_at) WHERE outcome IS NULL;
CREATE INDEX trained_step ON trained (step);
CREATE INDEX tool_calls_attempt ON tool_calls (attempt_pk) WHERE span IS NULL;
COMMIT;
